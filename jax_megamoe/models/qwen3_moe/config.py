"""What a Qwen3-MoE looks like: read from a Hugging Face folder, or one of the public sizes."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

_DTYPES = ("float32", "bfloat16", "float16")
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_REQUIRED_WITH_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")
_MOST_LAYERS = 10_000  # so that a damaged file is refused before its layers are counted out


@dataclasses.dataclass(frozen=True)
class Qwen3MoEConfig:
    """Sizes and switches of a Qwen3-MoE, under the names of Hugging Face's `config.json`.

    Frozen and hashable. Layer l has experts if it is not in `mlp_only_layers`, `num_experts` is
    not zero and (l + 1) is a multiple of `decoder_sparse_step`; otherwise it has a dense MLP of
    `intermediate_size`.

    Attributes:
      head_dim: width of a head; None stands for hidden_size / num_attention_heads.
      router_aux_loss_coef: factor of the load balancing loss in the total.
      eos_token_ids: every id that ends a text; `generate` stops at any of them.
      dtype: "float32", "bfloat16" or "float16", the format that the checkpoint is stored in.

    Raises:
      ValueError: for values out of range, and sizes that do not fit together.

    >>> config = Qwen3MoEConfig.preset("qwen3-30b-a3b", num_hidden_layers=2)
    >>> config.num_experts, config.head_dim, config.moe_layers
    (128, 128, (0, 1))
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self):
        for name in (*_REQUIRED, "decoder_sparse_step"):
            _positive(name, getattr(self, name))
        if self.num_hidden_layers > _MOST_LAYERS:
            raise ValueError(
                f"num_hidden_layers is {self.num_hidden_layers}; it must be at most {_MOST_LAYERS}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of "
                f"num_key_value_heads, {self.num_key_value_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size is {self.hidden_size}; without head_dim it must be a multiple "
                    f"of num_attention_heads, {self.num_attention_heads}"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _positive("head_dim", self.head_dim)
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even, RoPE turns halves")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not _is_number(value) or value <= 0:
                raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")
        for name in ("router_aux_loss_coef", "initializer_range"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise ValueError(f"{name} is {value!r}; it must be a finite number, at least 0")
        for name in ("norm_topk_prob", "attention_bias", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        for name in ("eos_token_ids", "mlp_only_layers"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)):
                raise ValueError(f"{name} is {value!r}; it must be a tuple of integers")
            object.__setattr__(self, name, tuple(value))  # a list could not be hashed
        for token in self.eos_token_ids:
            if not _is_integer(token) or token < 0:
                raise ValueError(
                    f"eos_token_ids holds {token!r}; it must hold integers of at least 0"
                )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(_DTYPES)}")
        for layer in self.mlp_only_layers:
            if not _is_integer(layer) or not 0 <= layer < self.num_hidden_layers:
                raise ValueError(
                    f"mlp_only_layers holds {layer!r}; it must be a layer number below "
                    f"{self.num_hidden_layers}"
                )
        if self.num_experts:
            for name in ("num_experts", *_REQUIRED_WITH_EXPERTS):
                _positive(name, getattr(self, name))
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(
                    f"num_experts_per_tok is {self.num_experts_per_tok}; it must be at most "
                    f"num_experts, {self.num_experts}"
                )
            if self.num_experts_per_tok == 1 and self.norm_topk_prob:
                warnings.warn(
                    "norm_topk_prob with one expert per token makes every routing weight 1, so "
                    "that the router learns from the load balancing loss alone",
                    stacklevel=2,
                )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        return tuple(
            layer
            for layer in range(self.num_hidden_layers)
            if self.num_experts
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Qwen3MoEConfig:
        """A named size: "tiny" (byte tokens, for tests and demonstrations), "qwen3-30b-a3b" or
        "qwen3-235b-a22b" (the public checkpoints' values); `changes` replaces fields, for example
        `num_hidden_layers=4`."""
        if name not in _PRESETS:
            raise ValueError(f"name is {name!r}; the presets are {', '.join(map(repr, _PRESETS))}")
        return cls(**{**_PRESETS[name], **changes})

    @classmethod
    def from_hf(cls, folder: str | Path) -> Qwen3MoEConfig:
        """Reads `config.json` and, for the end tokens, `generation_config.json` of a folder.

        Takes the keys of transformers 4 (`num_experts`, `rope_theta`, `torch_dtype`) and 5
        (`num_local_experts`, `rope_parameters`, `dtype`). A missing RoPE base is 10000, as there.

        Raises:
          FileNotFoundError: there is no `config.json`.
          ValueError: a file is no JSON object, a key that must be there is missing, or the model
            needs what this port does not compute (another RoPE type, activation, sliding window,
            quantised weights).
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; a checkpoint folder must hold it")
        raw = read_object(path)
        _refuse_unsupported(raw, path)

        experts = raw.get("num_experts", raw.get("num_local_experts"))
        required = _REQUIRED + (_REQUIRED_WITH_EXPERTS if experts else ())
        missing = [key for key in required if raw.get(key) is None]
        if experts is None:
            missing.append("num_experts")
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}")

        rope = raw.get("rope_parameters") or {}
        theta = rope.get("rope_theta", raw.get("rope_theta"))
        values = {
            f.name: raw[f.name] for f in dataclasses.fields(cls) if raw.get(f.name) is not None
        }
        values |= {
            "num_experts": experts,
            "mlp_only_layers": _layers(raw, path),
            "rope_theta": 10000.0 if theta is None else theta,
            "dtype": raw.get("dtype") or raw.get("torch_dtype") or "float32",
            "eos_token_ids": _ids(raw, path),
        }
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = _ids(read_object(generation), generation)
            values["eos_token_ids"] = eos or values["eos_token_ids"]
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The content of `config.json`, in the keys that transformers 4 and 5 both read."""
        values = dataclasses.asdict(self)
        eos, dtype = values.pop("eos_token_ids"), values.pop("dtype")
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **values,
            "mlp_only_layers": list(self.mlp_only_layers),
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "torch_dtype": dtype,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rope_scaling": None,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
            "use_cache": True,
        }


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises a ValueError that names the file if it holds none."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; it must hold a JSON object")
    return value


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    if raw.get("model_type", "qwen3_moe") != "qwen3_moe":
        raise ValueError(f"{path}: model_type is {raw['model_type']!r}; it must be 'qwen3_moe'")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act is {raw['hidden_act']!r}; it must be 'silu'")
    for key in ("rope_scaling", "rope_parameters", "quantization_config"):
        if not isinstance(raw.get(key) or {}, dict):
            raise ValueError(f"{path}: {key} is {raw[key]!r}; it must be an object or null")
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{path}: {key} has rope_type {kind!r}; only 'default' is supported")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"{path}: partial_rotary_factor is {rope['partial_rotary_factor']}; it must be 1"
            )
    if raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        raise ValueError(
            f"{path}: use_sliding_window is true (sliding_window {raw['sliding_window']}); a "
            "sliding window is not supported, only full causal attention"
        )
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method")
        raise ValueError(
            f"{path}: quantization_config says {method!r}; quantised checkpoints are not "
            "supported, the weights must be float32, bfloat16 or float16"
        )


def _positive(name: str, value: Any) -> None:
    if not _is_integer(value) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _layers(raw: dict[str, Any], path: Path) -> tuple[int, ...]:
    value = raw.get("mlp_only_layers") or []
    if not isinstance(value, list):
        raise ValueError(
            f"{path}: mlp_only_layers is {value!r}; it must be a list of layer numbers"
        )
    return tuple(value)


def _ids(raw: dict[str, Any], path: Path) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_integer(token) and token >= 0 for token in ids):
        raise ValueError(
            f"{path}: eos_token_id is {value!r}; it must be an integer of at least 0, or a list of "
            "such"
        )
    return tuple(ids)


_PUBLIC = dict(
    vocab_size=151936,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    router_aux_loss_coef=0.001,
    rope_theta=1e6,
    max_position_embeddings=40960,
    bos_token_id=151643,
    eos_token_ids=(151645, 151643),
    pad_token_id=151643,
    dtype="bfloat16",
)
_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=2048,
    ),
    "qwen3-30b-a3b": dict(
        _PUBLIC,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        moe_intermediate_size=768,
    ),
    "qwen3-235b-a22b": dict(
        _PUBLIC,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=94,
        num_attention_heads=64,
        moe_intermediate_size=1536,
    ),
}
