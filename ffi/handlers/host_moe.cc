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

float sigmoid(float v) { return 1.0f / (1.0f + std::exp(-v)); }

// Comparisons that a NaN fails, so that it stays.
float clamp_above(float v, float limit) { return v > limit ? limit : v; }
float clamp_both(float v, float limit) { return v > limit ? limit : (v < -limit ? -limit : v); }

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

  void forward() {
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) stage(rank, /*backward=*/false);
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) {
      make_plan(rank);
      each_segment(rank, /*backward=*/false, [&](const Segment& segment) {
        gate_up(rank, segment);
        swiglu(rank, segment);
        down(rank, segment);
      });
      write_stats(rank);
    }
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) combine(rank, ranks_[rank].y);
  }

  void backward() {
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) stage(rank, /*backward=*/true);
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) {
      make_plan(rank);
      zero_idle_experts(rank);
      each_segment(rank, /*backward=*/true, [&](const Segment& segment) {
        gate_up(rank, segment);
        down_gradient(rank, segment);
        swiglu_gradient(rank, segment);
        input_gradient(rank, segment);
        weight_gradients(rank, segment);
      });
    }
    for (int32_t rank = 0; rank < plan_shape_.ranks; ++rank) {
      combine(rank, ranks_[rank].dx);
      combine_weight_gradients(rank);
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

  // Calls work(segment) for every segment of every round, once the round's rows are in the pools.
  template <class Work>
  void each_segment(int32_t rank, bool backward, const Work& work) const {
    const PlanBuffers plan = blocks_.plan(rank);
    for (int32_t round = 0; round < num_rounds(plan_shape_, plan); ++round) {
      dispatch(rank, round, backward);
      const int64_t begin = int64_t{round} * plan_shape_.capacity_rows;
      const int64_t end = begin + plan_shape_.capacity_rows;
      for (int32_t e = 0; e < plan_shape_.local_experts; ++e) {
        const int64_t first = plan.expert_start[e];
        const int64_t last = first + plan.expert_rows[e];
        const int64_t from = std::max(first, begin);
        const int64_t to = std::min(last, end);
        if (from >= to) continue;
        const bool continued = first < begin;
        const bool continues = last > end;
        work(Segment{e, from - begin, to - from, plan.rows + from, continued, continues});
      }
    }
  }

  float* pool_row(int32_t rank, int64_t offset, int64_t row, int64_t width) const {
    return blocks_.at<float>(rank, offset) + row * width;
  }

  std::vector<float*> pool_rows(int32_t rank, int64_t offset, const Segment& segment,
                                int64_t width) const {
    std::vector<float*> rows(segment.rows);
    for (int64_t r = 0; r < segment.rows; ++r) {
      rows[r] = pool_row(rank, offset, segment.begin + r, width);
    }
    return rows;
  }

  int32_t home_rank(const PoolRow& row) const { return row.token / plan_shape_.tokens; }
  int64_t home_token(const PoolRow& row) const { return row.token % plan_shape_.tokens; }

  // Rows of the home ranks' [slot][token] buffers that belong to the segment's rows.
  std::vector<float*> return_rows(const Segment& segment) const {
    std::vector<float*> rows(segment.rows);
    for (int64_t r = 0; r < segment.rows; ++r) {
      const PoolRow& row = segment.sources[r];
      const int64_t slot_row = int64_t{row.slot} * plan_shape_.tokens + home_token(row);
      rows[r] = pool_row(home_rank(row), at_.returned, slot_row, hidden_);
    }
    return rows;
  }

  // Index of a pool row's (token, slot) at its home rank.
  int64_t home_slot(const PoolRow& row) const {
    return home_token(row) * plan_shape_.top_k + row.slot;
  }

  LeftMatrix pool_matrix(int32_t rank, int64_t offset, const Segment& segment,
                         int64_t width) const {
    return {pool_row(rank, offset, segment.begin, width), width, 1};
  }

  // The pool's rows as columns: rows are summed over.
  LeftMatrix pool_transposed(int32_t rank, int64_t offset, const Segment& segment,
                             int64_t width) const {
    return {pool_row(rank, offset, segment.begin, width), 1, width};
  }

  RightMatrix pool_operand(int32_t rank, int64_t offset, const Segment& segment,
                           int64_t width) const {
    return {pool_row(rank, offset, segment.begin, width), DType::kF32, width, 1};
  }

  // One expert's [rows, columns] weight matrix.
  RightMatrix weight(const void* weights, int32_t expert, int64_t rows, int64_t columns) const {
    return {offset(weights, call_.weight_type, int64_t{expert} * rows * columns), call_.weight_type,
            columns, 1};
  }

  RightMatrix transposed(RightMatrix matrix) const {
    std::swap(matrix.stride_k, matrix.stride_n);
    return matrix;
  }

  // Copies this rank's tokens to where its peers read them.
  void stage(int32_t rank, bool backward) const {
    const HostOperands& mine = ranks_[rank];
    const int64_t tokens = plan_shape_.tokens;
    const int64_t slots = tokens * plan_shape_.top_k;
    const size_t row_bytes = tokens * hidden_ * size_of(call_.x_type);
    if (slots == 0) return;
    if (row_bytes > 0) std::memcpy(blocks_.at<char>(rank, at_.staged_x), mine.x, row_bytes);
    if (row_bytes > 0 && backward) {
      std::memcpy(blocks_.at<char>(rank, at_.staged_dy), mine.dy, row_bytes);
    }
    std::copy_n(mine.expert_ids, slots, blocks_.at<int32_t>(rank, at_.staged_ids));
    std::copy_n(mine.expert_weights, slots, blocks_.at<float>(rank, at_.staged_weights));
  }

  void make_plan(int32_t rank) const {
    const PlanBuffers plan = blocks_.plan(rank);
    const int64_t slots = int64_t{plan_shape_.tokens} * plan_shape_.top_k;
    for (int32_t peer = 0; peer < plan_shape_.ranks; ++peer) {
      std::copy_n(blocks_.at<int32_t>(peer, at_.staged_ids), slots, plan.ids + peer * slots);
    }
    build_plan(plan_shape_, rank, plan);
  }

  // Pulls every source row that the round needs once, into all its pool rows.
  void dispatch(int32_t rank, int32_t round, bool backward) const {
    const PlanBuffers plan = blocks_.plan(rank);
    build_pull_list(plan_shape_, rank, plan, round);
    const int64_t entries = plan.pull_start[plan_shape_.local_experts];
    const int64_t tasks = (entries + kTokensPerTask - 1) / kTokensPerTask;
    parallel_for(tasks, kTokensPerTask * hidden_, [&](int64_t task) {
      const int64_t end = std::min(entries, (task + 1) * kTokensPerTask);
      for (int64_t i = task * kTokensPerTask; i < end; ++i) {
        pull_row(rank, round, plan.pull[i], at_.staged_x, at_.x_pool);
        if (backward) pull_row(rank, round, plan.pull[i], at_.staged_dy, at_.dy_pool);
      }
    });
  }

  void pull_row(int32_t rank, int32_t round, int32_t token, int64_t staged, int64_t pool) const {
    const PlanBuffers plan = blocks_.plan(rank);
    const int64_t begin = int64_t{round} * plan_shape_.capacity_rows;
    const char* source = offset(blocks_.at<char>(token / plan_shape_.tokens, staged), call_.x_type,
                                token % plan_shape_.tokens * hidden_);
    for (int32_t slot = 0; slot < plan_shape_.top_k; ++slot) {
      const int64_t row = plan.row_of[int64_t{token} * plan_shape_.top_k + slot] - begin;
      if (row < 0 || row >= plan_shape_.capacity_rows) continue;
      to_f32(source, call_.x_type, hidden_, pool_row(rank, pool, row, hidden_));
    }
  }

  void gate_up(int32_t rank, const Segment& segment) const {
    const LeftMatrix x = pool_matrix(rank, at_.x_pool, segment, hidden_);
    const HostOperands& mine = ranks_[rank];
    gemm(segment.rows, intermediate_, hidden_, x,
         weight(mine.w_gate, segment.expert, hidden_, intermediate_),
         pool_rows(rank, at_.gate_pool, segment, intermediate_).data(), false);
    gemm(segment.rows, intermediate_, hidden_, x,
         weight(mine.w_up, segment.expert, hidden_, intermediate_),
         pool_rows(rank, at_.up_pool, segment, intermediate_).data(), false);
  }

  float routing_weight(const PoolRow& row) const {
    return blocks_.at<float>(home_rank(row), at_.staged_weights)[home_slot(row)];
  }

  template <class F>
  void for_each_row(const Segment& segment, const F& f) const {
    // A sigmoid costs about as much as this many multiply-adds.
    constexpr int64_t kSigmoidCost = 16;
    parallel_for(segment.rows, intermediate_ * kSigmoidCost, f);
  }

  // The routing weight goes in before the down projection, as in the fused kernel.
  void swiglu(int32_t rank, const Segment& segment) const {
    for_each_row(segment, [&](int64_t r) {
      const float* gate = pool_row(rank, at_.gate_pool, segment.begin + r, intermediate_);
      const float* up = pool_row(rank, at_.up_pool, segment.begin + r, intermediate_);
      float* act = pool_row(rank, at_.act_pool, segment.begin + r, intermediate_);
      const float weight = routing_weight(segment.sources[r]);
      for (int64_t i = 0; i < intermediate_; ++i) {
        const float g = clamp_above(gate[i], call_.swiglu_limit);
        const float u = clamp_both(up[i], call_.swiglu_limit);
        act[i] = weight * (g * sigmoid(g) * u);
      }
    });
  }

  void down(int32_t rank, const Segment& segment) const {
    gemm(segment.rows, hidden_, intermediate_,
         pool_matrix(rank, at_.act_pool, segment, intermediate_),
         weight(ranks_[rank].w_down, segment.expert, intermediate_, hidden_),
         return_rows(segment).data(), false);
  }

  // dA = dY w_down^T, in the place of A.
  void down_gradient(int32_t rank, const Segment& segment) const {
    gemm(segment.rows, intermediate_, hidden_, pool_matrix(rank, at_.dy_pool, segment, hidden_),
         transposed(weight(ranks_[rank].w_down, segment.expert, intermediate_, hidden_)),
         pool_rows(rank, at_.act_pool, segment, intermediate_).data(), false);
  }

  // From the gate g, the up projection u and dA: A, dg and du in their places, and the routing
  // weight's gradient <dA, silu(g) u> sent home.
  void swiglu_gradient(int32_t rank, const Segment& segment) const {
    const float limit = call_.swiglu_limit;
    for_each_row(segment, [&](int64_t r) {
      float* gate = pool_row(rank, at_.gate_pool, segment.begin + r, intermediate_);
      float* up = pool_row(rank, at_.up_pool, segment.begin + r, intermediate_);
      float* act = pool_row(rank, at_.act_pool, segment.begin + r, intermediate_);
      const PoolRow& source = segment.sources[r];
      const float weight = routing_weight(source);
      float d_weight = 0;
      for (int64_t i = 0; i < intermediate_; ++i) {
        const float g = clamp_above(gate[i], limit);
        const float u = clamp_both(up[i], limit);
        const float s = sigmoid(g);
        const float silu = g * s;
        const float d_act = act[i];
        const bool gate_clamped = gate[i] > limit;
        const bool up_clamped = up[i] > limit || up[i] < -limit;
        d_weight += d_act * (silu * u);
        act[i] = weight * (silu * u);
        gate[i] = gate_clamped ? 0.0f : weight * d_act * u * (s * (1.0f + g * (1.0f - s)));
        up[i] = up_clamped ? 0.0f : weight * d_act * silu;
      }
      blocks_.at<float>(home_rank(source), at_.returned_weights)[home_slot(source)] = d_weight;
    });
  }

  // dX = dg w_gate^T + du w_up^T, straight to the home ranks.
  void input_gradient(int32_t rank, const Segment& segment) const {
    const std::vector<float*> rows = return_rows(segment);
    const HostOperands& mine = ranks_[rank];
    gemm(segment.rows, hidden_, intermediate_,
         pool_matrix(rank, at_.gate_pool, segment, intermediate_),
         transposed(weight(mine.w_gate, segment.expert, hidden_, intermediate_)), rows.data(),
         false);
    gemm(segment.rows, hidden_, intermediate_,
         pool_matrix(rank, at_.up_pool, segment, intermediate_),
         transposed(weight(mine.w_up, segment.expert, hidden_, intermediate_)), rows.data(), true);
  }

  void weight_gradients(int32_t rank, const Segment& segment) const {
    const HostOperands& mine = ranks_[rank];
    const LeftMatrix x = pool_transposed(rank, at_.x_pool, segment, hidden_);
    const LeftMatrix act = pool_transposed(rank, at_.act_pool, segment, intermediate_);
    weight_gradient(rank, segment, 0, hidden_, intermediate_, x,
                    pool_operand(rank, at_.gate_pool, segment, intermediate_), mine.dw_gate);
    weight_gradient(rank, segment, 1, hidden_, intermediate_, x,
                    pool_operand(rank, at_.up_pool, segment, intermediate_), mine.dw_up);
    weight_gradient(rank, segment, 2, intermediate_, hidden_, act,
                    pool_operand(rank, at_.dy_pool, segment, hidden_), mine.dw_down);
  }

  // Adds the segment's rows, in order, to one gradient of its expert. The sum lives in f32 until
  // the expert's last round; only the last expert of a round can have another one.
  void weight_gradient(int32_t rank, const Segment& segment, int32_t which, int64_t m, int64_t n,
                       const LeftMatrix& left, const RightMatrix& right, void* result) const {
    float* sum = blocks_.at<float>(rank, at_.carried) + which * m * n;
    std::vector<float*> rows(m);
    for (int64_t i = 0; i < m; ++i) rows[i] = sum + i * n;
    gemm(m, n, segment.rows, left, right, rows.data(), segment.continued);
    if (segment.continues) return;
    from_f32(sum, call_.weight_type, m * n, gradient_of(result, segment.expert));
  }

  char* gradient_of(void* gradients, int32_t expert) const {
    return static_cast<char*>(gradients) +
           int64_t{expert} * hidden_ * intermediate_ * size_of(call_.weight_type);
  }

  // Experts without rows get exact zeros.
  void zero_idle_experts(int32_t rank) const {
    const PlanBuffers plan = blocks_.plan(rank);
    const size_t bytes = hidden_ * intermediate_ * size_of(call_.weight_type);
    for (int32_t e = 0; e < plan_shape_.local_experts; ++e) {
      if (plan.expert_rows[e] > 0 || bytes == 0) continue;
      for (void* gradients : {ranks_[rank].dw_gate, ranks_[rank].dw_up, ranks_[rank].dw_down}) {
        std::memset(gradient_of(gradients, e), 0, bytes);
      }
    }
  }

  void write_stats(int32_t rank) const {
    const PlanBuffers plan = blocks_.plan(rank);
    std::copy_n(plan.expert_rows, plan_shape_.local_experts, ranks_[rank].expert_load);
    *ranks_[rank].invalid_ids = plan.expert_rows[plan_shape_.local_experts];
    *ranks_[rank].rounds = num_rounds(plan_shape_, plan);
  }

  bool is_routed(int32_t rank, int64_t slot) const {
    const int64_t id = blocks_.at<int32_t>(rank, at_.staged_ids)[slot];
    return id >= 0 && id < int64_t{plan_shape_.ranks} * plan_shape_.local_experts;
  }

  // Sums the returned rows of each token in slot order. Slots that are not routed were never
  // written and are never read.
  void combine(int32_t rank, void* result) const {
    const int64_t tokens = plan_shape_.tokens;
    const int64_t tasks = (tokens + kTokensPerTask - 1) / kTokensPerTask;
    parallel_for(tasks, kTokensPerTask * plan_shape_.top_k * hidden_, [&](int64_t task) {
      std::vector<float> sum(hidden_);
      const int64_t end = std::min(tokens, (task + 1) * kTokensPerTask);
      for (int64_t token = task * kTokensPerTask; token < end; ++token) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int32_t slot = 0; slot < plan_shape_.top_k; ++slot) {
          if (!is_routed(rank, token * plan_shape_.top_k + slot)) continue;
          const float* row = pool_row(rank, at_.returned, slot * tokens + token, hidden_);
          for (int64_t h = 0; h < hidden_; ++h) sum[h] += row[h];
        }
        from_f32(sum.data(), call_.x_type, hidden_,
                 static_cast<char*>(result) + token * hidden_ * size_of(call_.x_type));
      }
    });
  }

  void combine_weight_gradients(int32_t rank) const {
    const float* returned = blocks_.at<float>(rank, at_.returned_weights);
    for (int64_t slot = 0; slot < int64_t{plan_shape_.tokens} * plan_shape_.top_k; ++slot) {
      ranks_[rank].d_expert_weights[slot] = is_routed(rank, slot) ? returned[slot] : 0.0f;
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

void host_forward(const HostCall& call, const HostBlocks& blocks,
                  const std::vector<HostOperands>& ranks) {
  GroupCall(call, blocks, ranks).forward();
}

void host_backward(const HostCall& call, const HostBlocks& blocks,
                   const std::vector<HostOperands>& ranks) {
  GroupCall(call, blocks, ranks).backward();
}

}  // namespace megamoe
