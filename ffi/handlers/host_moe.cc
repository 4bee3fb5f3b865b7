#include "ffi/handlers/host_moe.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ffi/plan/host_plan.h"
#include "ffi/workspace/threads.h"

namespace megamoe {
namespace {

// Pull-list entries, or tokens of the final sum, of one task.
constexpr int64_t kTokensPerTask = 16;

float Sigmoid(float v) { return 1.0f / (1.0f + std::exp(-v)); }

// Comparisons that a NaN fails, so that it stays.
float ClampAbove(float v, float limit) { return v > limit ? limit : v; }
float ClampBoth(float v, float limit) { return v > limit ? limit : (v < -limit ? -limit : v); }

// One direction of one call. A phase is a member; it is run for every rank before the next begins,
// which is the barrier between them.
class GroupCall {
 public:
  GroupCall(const HostCall& call, const HostBlocks& blocks, const std::vector<HostOperands>& ranks)
      : call_(call),
        plan_shape_(call.shape.plan),
        blocks_(blocks),
        at_(blocks.layout()),
        ranks_(ranks),
        hidden_(call.shape.hidden),
        intermediate_(call.shape.intermediate) {}

  void Forward() {
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) Stage(rank, /*backward=*/false);
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) {
      MakePlan(rank);
      for (int32_t round = 0; round < NumRounds(plan_shape_, blocks_.plan(rank)); ++round) {
        Dispatch(rank, round, /*backward=*/false);
        for (const Segment& segment : Segments(rank, round)) {
          GateUp(rank, segment);
          Swiglu(rank, segment);
          Down(rank, segment);
        }
      }
      WriteStats(rank);
    }
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) Combine(rank, ranks_[rank].y);
  }

  void Backward() {
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) Stage(rank, /*backward=*/true);
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) {
      MakePlan(rank);
      ZeroIdleExperts(rank);
      for (int32_t round = 0; round < NumRounds(plan_shape_, blocks_.plan(rank)); ++round) {
        Dispatch(rank, round, /*backward=*/true);
        for (const Segment& segment : Segments(rank, round)) {
          GateUp(rank, segment);
          DownGradient(rank, segment);
          SwigluGradient(rank, segment);
          InputGradient(rank, segment);
          WeightGradients(rank, segment);
        }
      }
    }
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) {
      Combine(rank, ranks_[rank].dx);
      CombineWeightGradients(rank);
    }
  }

 private:
  // The rows of one expert in one round.
  struct Segment {
    int32_t expert;
    int64_t begin;  // first row in the round's pool
    int64_t rows;
    const PoolRow* sources;
    bool continued;  // the expert has rows in an earlier round
    bool continues;  // and in a later one
  };

  std::vector<Segment> Segments(int32_t rank, int32_t round) const {
    const PlanBuffers plan = blocks_.plan(rank);
    const int64_t begin = int64_t{round} * plan_shape_.capacity_rows;
    const int64_t end = begin + plan_shape_.capacity_rows;
    std::vector<Segment> segments;
    for (int32_t e = 0; e < plan_shape_.local_experts; ++e) {
      const int64_t first = plan.expert_start[e];
      const int64_t last = first + plan.expert_rows[e];
      const int64_t from = std::max(first, begin);
      const int64_t to = std::min(last, end);
      if (from >= to) continue;
      segments.push_back({e, from - begin, to - from, plan.rows + from, first<begin, last> end});
    }
    return segments;
  }

  float* Pool(int32_t rank, int64_t offset, int64_t row, int64_t width) const {
    return blocks_.At<float>(rank, offset) + row * width;
  }

  std::vector<float*> PoolRows(int32_t rank, int64_t offset, const Segment& segment,
                               int64_t width) const {
    std::vector<float*> rows(segment.rows);
    for (int64_t r = 0; r < segment.rows; ++r) {
      rows[r] = Pool(rank, offset, segment.begin + r, width);
    }
    return rows;
  }

  int32_t HomeRank(const PoolRow& row) const { return row.token / plan_shape_.tokens; }
  int64_t HomeToken(const PoolRow& row) const { return row.token % plan_shape_.tokens; }

  // Rows of the home ranks' [slot][token] buffers that belong to the segment's rows.
  std::vector<float*> ReturnRows(const Segment& segment) const {
    std::vector<float*> rows(segment.rows);
    for (int64_t r = 0; r < segment.rows; ++r) {
      const PoolRow& row = segment.sources[r];
      const int64_t slot_row = int64_t{row.slot} * plan_shape_.tokens + HomeToken(row);
      rows[r] = Pool(HomeRank(row), at_.returned, slot_row, hidden_);
    }
    return rows;
  }

  // Index of a pool row's (token, slot) at its home rank.
  int64_t HomeSlot(const PoolRow& row) const {
    return HomeToken(row) * plan_shape_.top_k + row.slot;
  }

  LeftMatrix PoolMatrix(int32_t rank, int64_t offset, const Segment& segment, int64_t width) const {
    return {Pool(rank, offset, segment.begin, width), width, 1};
  }

  // The pool's rows as columns: rows are summed over.
  LeftMatrix PoolTransposed(int32_t rank, int64_t offset, const Segment& segment,
                            int64_t width) const {
    return {Pool(rank, offset, segment.begin, width), 1, width};
  }

  RightMatrix PoolOperand(int32_t rank, int64_t offset, const Segment& segment,
                          int64_t width) const {
    return {Pool(rank, offset, segment.begin, width), DType::kF32, width, 1};
  }

  // One expert's [rows, columns] weight matrix.
  RightMatrix Weight(const void* weights, int32_t expert, int64_t rows, int64_t columns) const {
    return {Offset(weights, call_.weight_type, int64_t{expert} * rows * columns), call_.weight_type,
            columns, 1};
  }

  RightMatrix Transposed(RightMatrix matrix) const {
    std::swap(matrix.stride_k, matrix.stride_n);
    return matrix;
  }

  // Copies this rank's tokens to where its peers read them.
  void Stage(int32_t rank, bool backward) const {
    const HostOperands& mine = ranks_[rank];
    const int64_t tokens = plan_shape_.tokens;
    const int64_t slots = tokens * plan_shape_.top_k;
    const size_t row_bytes = tokens * hidden_ * SizeOf(call_.x_type);
    if (slots == 0) return;
    if (row_bytes > 0) std::memcpy(blocks_.At<char>(rank, at_.staged_x), mine.x, row_bytes);
    if (row_bytes > 0 && backward) {
      std::memcpy(blocks_.At<char>(rank, at_.staged_dy), mine.dy, row_bytes);
    }
    std::copy_n(mine.expert_ids, slots, blocks_.At<int32_t>(rank, at_.staged_ids));
    std::copy_n(mine.expert_weights, slots, blocks_.At<float>(rank, at_.staged_weights));
  }

  void MakePlan(int32_t rank) const {
    const PlanBuffers plan = blocks_.plan(rank);
    const int64_t slots = int64_t{plan_shape_.tokens} * plan_shape_.top_k;
    for (int32_t peer = 0; peer < plan_shape_.ranks; ++peer) {
      std::copy_n(blocks_.At<int32_t>(peer, at_.staged_ids), slots, plan.ids + peer * slots);
    }
    BuildPlan(plan_shape_, rank, plan);
  }

  // Pulls every source row that the round needs once, into all its pool rows.
  void Dispatch(int32_t rank, int32_t round, bool backward) const {
    const PlanBuffers plan = blocks_.plan(rank);
    BuildPullList(plan_shape_, rank, plan, round);
    const int64_t entries = plan.pull_start[plan_shape_.local_experts];
    const int64_t tasks = (entries + kTokensPerTask - 1) / kTokensPerTask;
    ParallelFor(tasks, kTokensPerTask * hidden_, [&](int64_t task) {
      const int64_t end = std::min(entries, (task + 1) * kTokensPerTask);
      for (int64_t i = task * kTokensPerTask; i < end; ++i) {
        PullRow(rank, round, plan.pull[i], at_.staged_x, at_.x_pool);
        if (backward) PullRow(rank, round, plan.pull[i], at_.staged_dy, at_.dy_pool);
      }
    });
  }

  void PullRow(int32_t rank, int32_t round, int32_t token, int64_t staged, int64_t pool) const {
    const PlanBuffers plan = blocks_.plan(rank);
    const int64_t begin = int64_t{round} * plan_shape_.capacity_rows;
    const char* source = Offset(blocks_.At<char>(token / plan_shape_.tokens, staged), call_.x_type,
                                token % plan_shape_.tokens * hidden_);
    for (int32_t slot = 0; slot < plan_shape_.top_k; ++slot) {
      const int64_t row = plan.row_of[int64_t{token} * plan_shape_.top_k + slot] - begin;
      if (row < 0 || row >= plan_shape_.capacity_rows) continue;
      ToF32(source, call_.x_type, hidden_, Pool(rank, pool, row, hidden_));
    }
  }

  void GateUp(int32_t rank, const Segment& segment) const {
    const LeftMatrix x = PoolMatrix(rank, at_.x_pool, segment, hidden_);
    const HostOperands& mine = ranks_[rank];
    Gemm(segment.rows, intermediate_, hidden_, x,
         Weight(mine.w_gate, segment.expert, hidden_, intermediate_),
         PoolRows(rank, at_.gate_pool, segment, intermediate_).data(), false);
    Gemm(segment.rows, intermediate_, hidden_, x,
         Weight(mine.w_up, segment.expert, hidden_, intermediate_),
         PoolRows(rank, at_.up_pool, segment, intermediate_).data(), false);
  }

  float RoutingWeight(const PoolRow& row) const {
    return blocks_.At<float>(HomeRank(row), at_.staged_weights)[HomeSlot(row)];
  }

  template <class F>
  void ForEachRow(const Segment& segment, const F& f) const {
    // A sigmoid costs about as much as this many multiply-adds.
    constexpr int64_t kSigmoidCost = 16;
    ParallelFor(segment.rows, intermediate_ * kSigmoidCost, f);
  }

  // The routing weight goes in before the down projection, as in the fused kernel.
  void Swiglu(int32_t rank, const Segment& segment) const {
    ForEachRow(segment, [&](int64_t r) {
      const float* gate = Pool(rank, at_.gate_pool, segment.begin + r, intermediate_);
      const float* up = Pool(rank, at_.up_pool, segment.begin + r, intermediate_);
      float* act = Pool(rank, at_.act_pool, segment.begin + r, intermediate_);
      const float weight = RoutingWeight(segment.sources[r]);
      for (int64_t i = 0; i < intermediate_; ++i) {
        const float g = ClampAbove(gate[i], call_.swiglu_limit);
        const float u = ClampBoth(up[i], call_.swiglu_limit);
        act[i] = weight * (g * Sigmoid(g) * u);
      }
    });
  }

  void Down(int32_t rank, const Segment& segment) const {
    Gemm(segment.rows, hidden_, intermediate_,
         PoolMatrix(rank, at_.act_pool, segment, intermediate_),
         Weight(ranks_[rank].w_down, segment.expert, intermediate_, hidden_),
         ReturnRows(segment).data(), false);
  }

  // dA = dY w_down^T, in the place of A.
  void DownGradient(int32_t rank, const Segment& segment) const {
    Gemm(segment.rows, intermediate_, hidden_, PoolMatrix(rank, at_.dy_pool, segment, hidden_),
         Transposed(Weight(ranks_[rank].w_down, segment.expert, intermediate_, hidden_)),
         PoolRows(rank, at_.act_pool, segment, intermediate_).data(), false);
  }

  // From the gate g, the up projection u and dA: A, dg and du in their places, and the routing
  // weight's gradient <dA, silu(g) u> sent home.
  void SwigluGradient(int32_t rank, const Segment& segment) const {
    const float limit = call_.swiglu_limit;
    ForEachRow(segment, [&](int64_t r) {
      float* gate = Pool(rank, at_.gate_pool, segment.begin + r, intermediate_);
      float* up = Pool(rank, at_.up_pool, segment.begin + r, intermediate_);
      float* act = Pool(rank, at_.act_pool, segment.begin + r, intermediate_);
      const PoolRow& source = segment.sources[r];
      const float weight = RoutingWeight(source);
      float d_weight = 0;
      for (int64_t i = 0; i < intermediate_; ++i) {
        const float g = ClampAbove(gate[i], limit);
        const float u = ClampBoth(up[i], limit);
        const float sigmoid = Sigmoid(g);
        const float silu = g * sigmoid;
        const float d_act = act[i];
        const bool gate_clamped = gate[i] > limit;
        const bool up_clamped = up[i] > limit || up[i] < -limit;
        d_weight += d_act * (silu * u);
        act[i] = weight * (silu * u);
        gate[i] =
            gate_clamped ? 0.0f : weight * d_act * u * (sigmoid * (1.0f + g * (1.0f - sigmoid)));
        up[i] = up_clamped ? 0.0f : weight * d_act * silu;
      }
      blocks_.At<float>(HomeRank(source), at_.returned_weights)[HomeSlot(source)] = d_weight;
    });
  }

  // dX = dg w_gate^T + du w_up^T, straight to the home ranks.
  void InputGradient(int32_t rank, const Segment& segment) const {
    const std::vector<float*> rows = ReturnRows(segment);
    const HostOperands& mine = ranks_[rank];
    Gemm(segment.rows, hidden_, intermediate_,
         PoolMatrix(rank, at_.gate_pool, segment, intermediate_),
         Transposed(Weight(mine.w_gate, segment.expert, hidden_, intermediate_)), rows.data(),
         false);
    Gemm(segment.rows, hidden_, intermediate_,
         PoolMatrix(rank, at_.up_pool, segment, intermediate_),
         Transposed(Weight(mine.w_up, segment.expert, hidden_, intermediate_)), rows.data(), true);
  }

  void WeightGradients(int32_t rank, const Segment& segment) const {
    const HostOperands& mine = ranks_[rank];
    const LeftMatrix x = PoolTransposed(rank, at_.x_pool, segment, hidden_);
    const LeftMatrix act = PoolTransposed(rank, at_.act_pool, segment, intermediate_);
    WeightGradient(rank, segment, 0, hidden_, intermediate_, x,
                   PoolOperand(rank, at_.gate_pool, segment, intermediate_), mine.dw_gate);
    WeightGradient(rank, segment, 1, hidden_, intermediate_, x,
                   PoolOperand(rank, at_.up_pool, segment, intermediate_), mine.dw_up);
    WeightGradient(rank, segment, 2, intermediate_, hidden_, act,
                   PoolOperand(rank, at_.dy_pool, segment, hidden_), mine.dw_down);
  }

  // Adds the segment's rows, in order, to one gradient of its expert. The sum lives in f32 until
  // the expert's last round; only the last expert of a round can have another one.
  void WeightGradient(int32_t rank, const Segment& segment, int32_t which, int64_t m, int64_t n,
                      const LeftMatrix& left, const RightMatrix& right, void* result) const {
    float* sum = blocks_.At<float>(rank, at_.carried) + which * m * n;
    std::vector<float*> rows(m);
    for (int64_t i = 0; i < m; ++i) rows[i] = sum + i * n;
    Gemm(m, n, segment.rows, left, right, rows.data(), segment.continued);
    if (segment.continues) return;
    FromF32(sum, call_.weight_type, m * n, GradientOf(result, segment.expert));
  }

  char* GradientOf(void* gradients, int32_t expert) const {
    return static_cast<char*>(gradients) +
           int64_t{expert} * hidden_ * intermediate_ * SizeOf(call_.weight_type);
  }

  // Experts without rows get exact zeros.
  void ZeroIdleExperts(int32_t rank) const {
    const PlanBuffers plan = blocks_.plan(rank);
    const size_t bytes = hidden_ * intermediate_ * SizeOf(call_.weight_type);
    for (int32_t e = 0; e < plan_shape_.local_experts; ++e) {
      if (plan.expert_rows[e] > 0 || bytes == 0) continue;
      for (void* gradients : {ranks_[rank].dw_gate, ranks_[rank].dw_up, ranks_[rank].dw_down}) {
        std::memset(GradientOf(gradients, e), 0, bytes);
      }
    }
  }

  void WriteStats(int32_t rank) const {
    const PlanBuffers plan = blocks_.plan(rank);
    std::copy_n(plan.expert_rows, plan_shape_.local_experts, ranks_[rank].expert_load);
    *ranks_[rank].invalid_ids = plan.expert_rows[plan_shape_.local_experts];
    *ranks_[rank].rounds = NumRounds(plan_shape_, plan);
  }

  bool IsRouted(int32_t rank, int64_t slot) const {
    const int64_t id = blocks_.At<int32_t>(rank, at_.staged_ids)[slot];
    return id >= 0 && id < int64_t{plan_shape_.ranks} * plan_shape_.local_experts;
  }

  // Sums the returned rows of each token in slot order. Slots that are not routed were never
  // written and are never read.
  void Combine(int32_t rank, void* result) const {
    const int64_t tokens = plan_shape_.tokens;
    const int64_t tasks = (tokens + kTokensPerTask - 1) / kTokensPerTask;
    ParallelFor(tasks, kTokensPerTask * plan_shape_.top_k * hidden_, [&](int64_t task) {
      std::vector<float> sum(hidden_);
      const int64_t end = std::min(tokens, (task + 1) * kTokensPerTask);
      for (int64_t token = task * kTokensPerTask; token < end; ++token) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int32_t slot = 0; slot < plan_shape_.top_k; ++slot) {
          if (!IsRouted(rank, token * plan_shape_.top_k + slot)) continue;
          const float* row = Pool(rank, at_.returned, slot * tokens + token, hidden_);
          for (int64_t h = 0; h < hidden_; ++h) sum[h] += row[h];
        }
        FromF32(sum.data(), call_.x_type, hidden_,
                static_cast<char*>(result) + token * hidden_ * SizeOf(call_.x_type));
      }
    });
  }

  void CombineWeightGradients(int32_t rank) const {
    const float* returned = blocks_.At<float>(rank, at_.returned_weights);
    for (int64_t slot = 0; slot < int64_t{plan_shape_.tokens} * plan_shape_.top_k; ++slot) {
      ranks_[rank].d_expert_weights[slot] = IsRouted(rank, slot) ? returned[slot] : 0.0f;
    }
  }

  const HostCall& call_;
  const PlanShape& plan_shape_;
  const HostBlocks& blocks_;
  const WorkspaceLayout& at_;
  const std::vector<HostOperands>& ranks_;
  const int64_t hidden_;
  const int64_t intermediate_;
};

}  // namespace

void HostForward(const HostCall& call, const HostBlocks& blocks,
                 const std::vector<HostOperands>& ranks) {
  GroupCall(call, blocks, ranks).Forward();
}

void HostBackward(const HostCall& call, const HostBlocks& blocks,
                  const std::vector<HostOperands>& ranks) {
  GroupCall(call, blocks, ranks).Backward();
}

}  // namespace megamoe
