"""What cannot run says so when it is traced: the name, the value seen, what would be accepted."""

import re

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Shape, make_inputs, make_mesh, require_ffi
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe import MoEConfig, _implementation, _mesh, _runtime, moe, moe_mlp, nnx

NAMES = ("x", "expert_ids", "expert_weights", "w_gate", "w_up", "w_down")


def arguments(**changed):
    args = dict(zip(NAMES, make_inputs(Shape(16, 2, 4, 64, 128)).args, strict=True))
    return args | changed


@pytest.mark.parametrize(
    "name, dtype, accepted",
    [
        ("x", "float16", "bfloat16 or float32"),
        ("x", "int32", "bfloat16 or float32"),
        ("expert_ids", "float32", "int32"),
        ("expert_ids", "uint32", "int32"),
        ("expert_weights", "bfloat16", "float32"),
        ("w_gate", "float16", "bfloat16 or float32"),
        ("w_up", "bfloat16", "float32, as w_gate"),
        ("w_down", "bfloat16", "float32, as w_gate"),
    ],
)
def test_dtype(name, dtype, accepted):
    args = arguments()
    args[name] = args[name].astype(dtype)
    with pytest.raises(TypeError, match=f"^{name} is {dtype}; it must be {accepted}$"):
        moe_mlp(**args)


@pytest.mark.parametrize("name", NAMES)
def test_rank(name):
    args = arguments()
    args[name] = args[name][0]
    with pytest.raises(ValueError, match=rf"^{name} has shape .* must have [23] dimensions, \["):
        moe_mlp(**args)


@pytest.mark.parametrize("name", NAMES)
def test_no_array(name):
    with pytest.raises(TypeError, match=f"^{name} is a list; it must be a jax.Array$"):
        moe_mlp(**arguments(**{name: [1.0]}))


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("x", (15, 64), "expert_ids has 16 rows; it must have one per token of x, 15"),
        ("x", (16, 32), "w_gate has hidden size 64; it must be that of x, 32"),
        ("expert_weights", (16, 3), r"expert_weights has shape \(16, 3\); .* \(16, 2\)"),
        ("expert_ids", (16, 0), "expert_ids has 0 experts per token; it must be between 1 and"),
        ("w_up", (4, 64, 64), r"w_up has shape \(4, 64, 64\); .* must be \(4, 64, 128\)"),
        ("w_up", (3, 64, 128), r"w_up has shape \(3, 64, 128\); .* must be \(4, 64, 128\)"),
        ("w_down", (4, 64, 128), r"w_down has shape \(4, 64, 128\); .* must be \(4, 128, 64\)"),
        ("w_gate", (0, 64, 128), "w_gate has shape .*; no dimension may be 0"),
    ],
)
def test_size(name, shape, message):
    args = arguments()
    args[name] = jnp.zeros(shape, args[name].dtype)
    if name == "expert_ids":
        args["expert_weights"] = jnp.zeros(shape)
    with pytest.raises(ValueError, match=f"^{message}"):
        moe_mlp(**args)


def test_more_slots_than_experts():
    ids = jnp.zeros((16, 5), jnp.int32)
    with pytest.raises(ValueError, match="5 experts per token; .* the number of experts, 4$"):
        moe_mlp(**arguments(expert_ids=ids, expert_weights=jnp.zeros((16, 5))))


def test_slots_beyond_int32():
    tokens = 2**28
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((tokens, 8), jnp.bfloat16),
            ((tokens, 8), jnp.int32),
            ((tokens, 8), jnp.float32),
            ((8, 8, 8), jnp.bfloat16),
            ((8, 8, 8), jnp.bfloat16),
            ((8, 8, 8), jnp.bfloat16),
        )
    ]
    with pytest.raises(ValueError, match="268435456 tokens .* must not exceed 2147483647"):
        jax.eval_shape(moe_mlp, *args)


@pytest.mark.parametrize(
    "tokens, width, message",
    [(4, 2**31, "hidden 2147483648"), (2**30 - 1, 8, "capacity_rows 21474")],
)
def test_sizes_beyond_what_the_custom_calls_count(tokens, width, message):
    require_ffi()
    shapes = [
        (tokens, width),
        (tokens, 2),
        (tokens, 2),
        (4, width, 8),
        (4, width, 8),
        (4, 8, width),
    ]
    dtypes = ["bfloat16", "int32", "float32", *["bfloat16"] * 3]
    args = map(jax.ShapeDtypeStruct, shapes, dtypes)
    config = MoEConfig(implementation="ffi")
    with pytest.raises(
        ValueError, match=f"{message}.*; it must not exceed 2147483647, and the 'xl"
    ):
        jax.eval_shape(lambda *a: moe_mlp(*a, config=config), *args)


def test_axis_that_is_not_bound():
    with pytest.raises(ValueError, match="axis_name is 'expert', which no enclosing jax.shard_map"):
        moe_mlp(**arguments(), axis_name="expert")
    mesh = make_mesh((2, 4), ("data", "ep"))
    f = sharded_over_data(mesh)
    with pytest.raises(ValueError, match="axis_name is 'expert', .* the axes are 'data', 'ep'"):
        f(*arguments().values())


def test_axis_that_is_no_name():
    with pytest.raises(TypeError, match="^axis_name is 3; it must be the name of one axis, or"):
        moe_mlp(**arguments(), axis_name=3)


@pytest.mark.parametrize("value", [None, "xla", {"implementation": "xla"}])
def test_config_of_another_type(value):
    message = f"^config is a {type(value).__name__}; it must be a jax_megamoe.MoEConfig$"
    with pytest.raises(TypeError, match=message):
        moe_mlp(**arguments(), config=value)
    with pytest.raises(TypeError, match=message):
        moe(**arguments(), mesh=make_mesh(), expert_axis="expert", config=value)


def test_statistics_are_asked_for_or_not():
    with pytest.raises(TypeError, match="^return_stats is 'no'; it must be True or False$"):
        moe_mlp(**arguments(), return_stats="no")
    with pytest.raises(TypeError, match="^norm_topk_prob is 1; it must be True or False$"):
        nnx.MoE(8, 16, 4, 2, norm_topk_prob=1, rngs=flax.nnx.Rngs(0))


def sharded_over_data(mesh):
    specs = (P("data"),) * 3 + (P(),) * 3
    return jax.shard_map(
        lambda *a: moe_mlp(*a, axis_name="expert"), mesh=mesh, in_specs=specs, out_specs=P("data")
    )


def test_global_arrays_instead_of_a_shard():
    mesh = make_mesh((4,), ("data",), explicit=True)
    for name in NAMES:
        args, spec = arguments(), P("data")
        args[name] = jax.device_put(args[name], NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=f"^{name} is sharded over 'data'; .* call moe"):
            jax.jit(lambda a: moe_mlp(**a))(args)


class TestMoe:
    def test_experts_must_divide(self):
        for experts, ranks in ((6, 4), (2, 4), (63, 4)):
            args = make_inputs(Shape(16, 2, experts, 8, 8)).args
            message = (
                f"^w_gate has {experts} experts on axis 'expert' of size {ranks}; "
                "the expert count must be a multiple of it$"
            )
            with pytest.raises(ValueError, match=message):
                moe(*args, mesh=make_mesh((2, ranks), ("data", "expert")), expert_axis="expert")

    def test_axes_must_be_in_the_mesh(self):
        mesh = make_mesh((2, 4), ("data", "expert"))
        with pytest.raises(ValueError, match="^expert_axis is 'ep'; the axes are 'data', 'expert'"):
            moe(**arguments(), mesh=mesh, expert_axis="ep")
        with pytest.raises(ValueError, match="^token_axes names 'seq'; the axes are 'data'"):
            moe(**arguments(), mesh=mesh, expert_axis="expert", token_axes=("seq",))
        with pytest.raises(ValueError, match="^token_axes is .*; an axis may be named only once"):
            moe(**arguments(), mesh=mesh, expert_axis="expert", token_axes=("data", "data"))

        for axes, found in ((3, "3"), ({"data"}, "{'data'}"), ((("data",),), r"\('data',\)")):
            message = f"^token_axes names {found}; it must be a name or a sequence of names; the"
            with pytest.raises(ValueError, match=message):
                moe(**arguments(), mesh=mesh, expert_axis="expert", token_axes=axes)
        for axis in (("expert",), ["expert"], None, 3):
            message = f"^expert_axis is {re.escape(repr(axis))}; it must be the name of one axis; "
            with pytest.raises(ValueError, match=message):
                moe(**arguments(), mesh=mesh, expert_axis=axis)

    def test_no_slots(self):
        ids, weights = jnp.zeros((16, 0), jnp.int32), jnp.zeros((16, 0))
        with pytest.raises(
            ValueError, match=r"^expert_ids has shape \(16, 0\); the last dimension"
        ):
            args = arguments(expert_ids=ids, expert_weights=weights)
            moe(**args, mesh=make_mesh(), expert_axis="expert")

    def test_a_mesh_is_needed(self):
        with pytest.raises(ValueError, match="^mesh is None and there is no jax.set_mesh"):
            moe(**arguments(), expert_axis="expert")
        with pytest.raises(ValueError, match="^mesh is None and there is no jax.set_mesh"):
            jax.eval_shape(lambda a: moe(**a, expert_axis="expert"), arguments())
        with pytest.raises(TypeError, match="^mesh is a tuple; it must be a jax.sharding.Mesh$"):
            moe(**arguments(), mesh=(2, 4), expert_axis="expert")

    def test_a_mesh_without_devices_must_be_that_of_set_mesh(self):
        mesh = make_mesh((2, 4), ("data", "expert"))
        abstract = mesh.abstract_mesh
        message = r"^mesh is AbstractMesh\(.*, which has no devices; it must be a jax.sharding.Mesh"
        with pytest.raises(ValueError, match=message):
            moe(**arguments(), mesh=abstract, expert_axis="expert")
        with pytest.raises(ValueError, match=message):
            nnx.MoE(4, 8, 4, 1, mesh=abstract, expert_axis="expert", rngs=flax.nnx.Rngs(0))
        with jax.sharding.use_abstract_mesh(abstract):
            with pytest.raises(ValueError, match=message):
                moe(**arguments(), mesh=abstract, expert_axis="expert")
            y = jax.eval_shape(lambda a: moe(**a, mesh=abstract, expert_axis="expert"), arguments())
            assert y.shape == arguments()["x"].shape
        with jax.set_mesh(mesh):
            call = jax.jit(lambda a: moe(**a, mesh=abstract, expert_axis="expert"))
            assert call(arguments()).shape == arguments()["x"].shape

    @pytest.mark.parametrize("explicit", [False, True])
    def test_the_mesh_is_that_of_set_mesh(self, explicit):
        other = make_mesh((2, 4), ("data", "expert"), explicit=not explicit)
        with jax.set_mesh(make_mesh((2, 4), ("data", "expert"), explicit=explicit)):
            for mesh in (make_mesh((4,)), other, other.abstract_mesh):
                with pytest.raises(
                    ValueError, match="^mesh is .*; it must be that of jax.set_mesh"
                ):
                    moe(**arguments(), mesh=mesh, expert_axis="expert")
                with pytest.raises(
                    ValueError, match="^mesh is .*; it must be that of jax.set_mesh"
                ):
                    nnx.MoE(4, 8, 4, 1, mesh=mesh, expert_axis="expert", rngs=flax.nnx.Rngs(0))

    def test_inside_a_shard_map(self):
        mesh = make_mesh((2, 4), ("data", "expert"))
        f = jax.shard_map(
            lambda *a: moe(*a, mesh=mesh, expert_axis="expert"),
            mesh=mesh,
            in_specs=(P("data"),) * 3 + (P("expert"),) * 3,
            out_specs=P("data"),
        )
        with pytest.raises(ValueError, match="inside a shard_map use moe_mlp"):
            f(*arguments().values())

    def test_leading_dimensions(self):
        mesh = make_mesh()
        with pytest.raises(ValueError, match="^x has shape .* at least 2 dimensions"):
            moe(**arguments(x=jnp.zeros(64)), mesh=mesh, expert_axis="expert")
        with pytest.raises(ValueError, match="^expert_ids has shape .* those of x, .4, 4.$"):
            moe(**arguments(x=jnp.zeros((4, 4, 64))), mesh=mesh, expert_axis="expert")


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "fp8_bwd"])
@pytest.mark.parametrize("implementation", ["auto", "xla", "ffi"])
def test_precision_that_cannot_run(implementation, precision):
    if implementation == "ffi":
        require_ffi()
    config = MoEConfig(precision=precision, implementation=implementation)
    with pytest.raises(ValueError, match=f"{precision}'"):
        moe_mlp(**arguments(), config=config)


def test_custom_calls_that_cannot_run(monkeypatch):
    config = MoEConfig(implementation="ffi")
    monkeypatch.setattr(_runtime, "unavailable", lambda: "the compiled module is missing")
    with pytest.raises(ValueError, match="compiled module is missing; 'xla' runs on any backend$"):
        moe_mlp(**arguments(), config=config)
    assert np.isfinite(jax.jit(moe_mlp)(*arguments().values())).all()  # "auto" takes "xla"


def test_custom_calls_serve_one_process_on_the_host(monkeypatch):
    require_ffi()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="there are 2 processes .*'xla' runs on any backend$"):
        moe_mlp(**arguments(), config=MoEConfig(implementation="ffi"))


def test_custom_calls_on_another_platform(monkeypatch):
    require_ffi()
    assert "the platform is 'tpu'" in _implementation.why_not_ffi("tpu")
    monkeypatch.setattr(_runtime, "with_cuda", lambda: False)
    assert "built without CUDA" in _implementation.why_not_ffi("gpu")


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"hidden": 100}, "the hidden size is 100 and must be a multiple of 64"),
        ({"intermediate": 96}, "the intermediate size is 96 and must be a multiple of 64"),
        ({"top_k": 33}, "expert_ids has 33 slots a token and the kernels take at most 32"),
        ({"local_experts": 257}, "w_gate has 257 experts on this rank and the kernels take at mo"),
    ],
)
def test_sizes_that_the_gpu_kernels_do_not_take(monkeypatch, sizes, reason):
    monkeypatch.setattr(_mesh, "platform", lambda: "gpu")
    monkeypatch.setattr(_implementation, "why_not_ffi", lambda platform: None)
    sizes = {"hidden": 128, "intermediate": 64, "top_k": 8, "local_experts": 16} | sizes
    # "auto" says so too: a size that falls off the fast path should be seen.
    for implementation in ("ffi", "auto"):
        with pytest.raises(ValueError, match=f"{reason}.*; 'xla' runs on any backend$"):
            _implementation.choose(MoEConfig(implementation=implementation), None, **sizes)
    assert _implementation.choose(MoEConfig(implementation="xla"), None, **sizes) == "xla"


def test_custom_calls_need_every_mesh_axis_manual():
    require_ffi()
    mesh = make_mesh((2, 4), ("data", "expert"))
    f = jax.shard_map(
        lambda *a: moe_mlp(*a, axis_name="expert", config=MoEConfig(implementation="ffi")),
        mesh=mesh,
        axis_names={"expert"},
        in_specs=(P("expert"),) * 6,
        out_specs=P("expert"),
    )
    with pytest.raises(ValueError, match="leaves the mesh axes 'data' to the compiler"):
        jax.eval_shape(f, *arguments().values())


def test_custom_calls_over_an_axis_of_vmap():
    require_ffi()
    f = jax.vmap(
        lambda *a: moe_mlp(*a, axis_name="expert", config=MoEConfig(implementation="ffi")),
        axis_name="expert",
    )
    x, ids, weights, *experts = arguments().values()
    args = [a.reshape(4, 4, -1) for a in (x, ids, weights)] + [w[:, None] for w in experts]
    with pytest.raises(ValueError, match="'expert' is not an axis of a jax.shard_map"):
        f(*args)


@pytest.mark.parametrize(
    "field, value",
    [
        ("precision", "fp4"),
        ("implementation", "cuda"),
        ("capacity_factor", 0),
        ("capacity_factor", float("nan")),
        ("capacity_factor", 1e308),
        pytest.param("capacity_factor", 10**400, id="capacity_factor-large-integer"),
        ("timeout_s", -1),
        ("timeout_s", 1e10),
        ("capacity_factor", "2"),
        ("capacity_factor", True),
        ("swiglu_limit", 0.0),
        ("swiglu_limit", 1e39),
        ("swiglu_limit", 1e-60),
        ("reserved_sms", -1),
        ("reserved_sms", True),
        ("reserved_sms", 2**31),
        ("precision", None),
        ("wgrad_precision", "fp4"),
    ],
)
def test_config(field, value):
    with pytest.raises(ValueError, match="^" + re.escape(f"{field} is {value!r}; it must be")):
        MoEConfig(**{field: value})


def test_config_takes_the_numbers_of_numpy(implementation):
    options = {"capacity_factor": 1.5, "reserved_sms": 4, "implementation": implementation}
    config = MoEConfig(
        **options | {"capacity_factor": np.float32(1.5), "reserved_sms": np.int64(4)}
    )
    assert config == MoEConfig(**options) and hash(config) == hash(MoEConfig(**options))
    assert np.isfinite(moe_mlp(**arguments(), config=config)).all()
