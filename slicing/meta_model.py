"""Build a base model on torch's meta device and list what LoRA can change in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moelora.slicing.base_model import BaseModule
from moelora.slicing.errors import InputError

if TYPE_CHECKING:
    from torch import nn

# Model types of remote code whose model is one that transformers has under another name:
# Kimi-K2 is published as DeepseekV3ForCausalLM with a config class of its own.
SAME_MODEL = {"kimi_k2": "deepseek_v3"}

# Modules whose 2-D parameters hold the rows of all experts, one below the other (DBRX).
FLAT_EXPERTS = {"DbrxExpertGLU": ("w1", "v1", "w2")}


def build_config(fields: dict[str, Any], where: str) -> Any:
    """Return transformers' config object for the fields of a ``config.json``.

    Raises:
        InputError: transformers does not know the model type, or refuses the fields.
    """
    from transformers import AutoConfig

    stated = fields.get("quantization_config")
    if stated is not None and not isinstance(stated, dict):
        raise InputError(
            f"{where}: quantization_config is {type(stated).__name__}, expected an object",
            hint="take the base's own config.json, or take the entry out where nothing is quantised",
        )
    # auto_map names remote code, which is never run: the model type decides.
    known = {k: _floats(v) for k, v in fields.items() if k not in ("auto_map", "model_type")}
    model_type = fields["model_type"]
    try:
        return AutoConfig.for_model(SAME_MODEL.get(model_type, model_type), **known)
    except Exception as error:
        hint = "moelora places modules by transformers' own model; a newer transformers may "
        hint += "know this type"
        if fields.get("auto_map"):
            hint += "; the code that its auto_map names is never run, and no option makes it run"
        raise InputError(
            f"{where}: transformers cannot read a config of model type "
            f"{model_type!r} ({type(error).__name__}: {_short(error)})",
            hint=hint,
        ) from error


def _floats(value: Any) -> Any:
    """transformers writes infinity as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(str(value["__float__"]))
        return {key: _floats(item) for key, item in value.items()}
    return [_floats(item) for item in value] if isinstance(value, list) else value


def _short(error: Exception) -> str:
    """transformers lists every type it knows: keep what says something."""
    line = (str(error).splitlines() or [""])[0]
    return line if len(line) <= 200 else line[:200] + "…"


def model_class(config: Any) -> Any:
    """Return the transformers class of a config: the one its ``architectures`` name, else the
    causal language model, else the one that takes text beside images.

    Raises:
        InputError: transformers has no such class.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    named = getattr(config, "architectures", None)
    for name in named if isinstance(named, list) else []:
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        getattr(auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}),
        {"qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration"},
    ):
        name = mapping.get(config.model_type)
        if isinstance(name, str) and hasattr(transformers, name):
            return getattr(transformers, name)
    raise InputError(
        f"model type {config.model_type!r}: transformers has no language model for it",
        hint="moelora places modules by transformers' own model; a newer transformers may have it",
    )


def new_model(config: Any, **options: Any) -> nn.Module:
    """Return a model of ``config`` with weights as transformers initialises them."""
    model: nn.Module = model_class(config)._from_config(config, **options)
    return model


def build_meta_model(config: Any, where: str) -> nn.Module:
    """Return the model of ``config`` on the meta device (no memory for weights).

    Raises:
        InputError: transformers has no language model for this config, or cannot build it.
    """
    import torch

    cls = model_class(config)
    try:
        with torch.device("meta"):
            return cls._from_config(config)
    except Exception as error:
        raise InputError(
            f"{where}: transformers cannot build {cls.__name__} from this config "
            f"({type(error).__name__}: {_short(error)})"
        ) from error


def language_model(model: nn.Module) -> nn.Module:
    """Return the part of a model that answers text: a part with an output layer of its own
    (the thinker of an omni model), else all of it."""
    for name in ("thinker", "language_model"):
        part: nn.Module | None = getattr(model, name, None)
        if part is not None and getattr(part, "lm_head", None) is not None:
            return part
    return model


def module_tree(model: nn.Module) -> dict[str, BaseModule]:
    """Return every place that LoRA can change, by path, in definition order."""
    from torch import nn

    inside = _language_paths(model)
    tree: dict[str, BaseModule] = {}
    for path, module in model.named_modules():
        own = path.startswith(inside)
        parameters = dict(module.named_parameters(recurse=False))
        weight = parameters.get("weight")
        if own and (experts := _expert_parameters(path, module, parameters)):
            tree.update((entry.path, entry) for entry in experts)
        elif isinstance(module, nn.Embedding) and weight is not None:
            tree[path] = BaseModule(path, "embedding", tuple(weight.shape), in_language_model=own)
        elif weight is not None and weight.dim() == 2:
            heads = _key_value_heads(model, path)
            tree[path] = BaseModule(
                path,
                "linear",
                tuple(weight.shape),
                in_language_model=own,
                num_key_value_heads=heads,
            )
        elif weight is not None and weight.dim() > 2:
            tree[path] = BaseModule(path, "other", tuple(weight.shape), in_language_model=own)
    return tree


def _language_paths(model: nn.Module) -> tuple[str, ...]:
    """Return how the paths of the language model's modules start: what holds the input
    embeddings, and the output embeddings."""
    text: Any = language_model(model)
    wanted = (text.get_input_embeddings(), text.get_output_embeddings())
    paths = {id(module): path for path, module in model.named_modules()}
    found = [paths[id(module)] for module in wanted if id(module) in paths]
    return (found[0].rpartition(".")[0] + ".", *found[1:]) if found else ("",)


def _key_value_heads(model: nn.Module, path: str) -> int | None:
    """Return the key/value heads of the attention that a linear module stands in.

    Every attention of transformers says how many query heads share one; the number of heads
    itself differs by layer in some families (Gemma-4, MiMo-V2).
    """
    parent = model.get_submodule(path.rpartition(".")[0])
    groups = getattr(parent, "num_key_value_groups", None)
    heads = getattr(getattr(parent, "config", None), "num_attention_heads", None)
    return heads // groups if isinstance(groups, int) and isinstance(heads, int) else None


def _expert_parameters(
    path: str, module: nn.Module, parameters: dict[str, Any]
) -> list[BaseModule]:
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    flat = FLAT_EXPERTS.get(type(module).__name__)
    if flat is not None:
        count = int(module.moe_num_experts)  # type: ignore[arg-type]
        rows = shapes[flat[0]][0] // count
        return [_flat_expert(f"{path}.{name}", count, rows, shapes[name][1]) for name in flat]
    if type(module).__name__ == "JetMoeParallelExperts":
        leaf = path.rpartition(".")[2]
        layout = "concatenated" if leaf == "input_linear" and ".mlp." in path else None
        return [BaseModule(f"{path}.weight", "expert", shapes["weight"], gate_up_layout=layout)]
    if "weight" in shapes:
        return []
    stacked = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    return [_expert(f"{path}.{name}", name, module, shape) for name, shape in stacked.items()]


def _flat_expert(path: str, count: int, rows: int, hidden: int) -> BaseModule:
    """DBRX stores each expert's rows below the other's; w2 as ``(rows, hidden)`` like w1."""
    is_down = path.endswith(".w2")
    shape = (count, hidden, rows) if is_down else (count, rows, hidden)
    return BaseModule(path, "expert", shape, transposed=is_down, flat=True)


def _expert(path: str, name: str, module: nn.Module, shape: tuple[int, ...]) -> BaseModule:
    declared = getattr(module, "is_transposed", None)
    # Llama-4 stores (experts, in, out) like gpt-oss, but does not say so.
    transposed = type(module).__name__ == "Llama4TextExperts" if declared is None else declared
    num_experts, first, second = shape
    layout = None
    if name == "gate_up_proj":
        concatenated = getattr(module, "is_concatenated", True)
        layout = "concatenated" if concatenated else "interleaved"
    return BaseModule(
        path,
        "expert",
        (num_experts, second, first) if transposed else shape,
        bool(transposed),
        layout,
        declares_transposed=declared is not None,
    )
