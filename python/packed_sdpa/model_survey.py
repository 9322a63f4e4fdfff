"""What ``attach`` finds in a model: attention modules and their route, the forwards that get documents, leaks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from packed_sdpa import guard, hf

_ATTENTION_LIKE = re.compile(r"attn|attention|mixer|mha", re.IGNORECASE)
_STATE_SPACE = re.compile(
    r"Mamba|SSM|Rwkv|RWKV|Retention|DeltaNet|LinearAtt|LightningAtt|Hyena|ShortConv|Recurrent|Rglru|RGLRU|xLSTM"
)
_MIXES_NO_TOKENS = re.compile(r"(MLP|Norm\w*|Embeddings?|Experts?|Router|Gate|Head|Linear|Cache|Act\w*)$")
_TOKEN_PARAMETERS = ("input_ids", "inputs_embeds")


@dataclass
class Survey:
    """Names are qualified names in the model that was given to attach."""

    interface: list[tuple[str, nn.Module]] = field(default_factory=list)
    hooks: list[tuple[str, nn.Module]] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)  # of Transformers models and modules to switch
    outer: list[nn.Module] = field(default_factory=list)  # forwards in which documents are looked for
    leaking: list[str] = field(default_factory=list)  # layers that mix tokens without attention
    of_another_kind: dict[str, str] = field(
        default_factory=dict
    )  # attention modules with an implementation of their own
    encoder_decoder: str = ""  # class name, when the model has two sides

    @property
    def route(self) -> str:
        return "+".join(name for name, modules in (("interface", self.interface), ("hooks", self.hooks)) if modules)


def survey(model: nn.Module, route: str, matches: Callable[[str, nn.Module], bool] | None) -> Survey:
    """Looks only. Raises ValueError when the route or ``match`` finds nothing, naming what there is instead."""
    modules = dict(model.named_modules())
    owners = _owners(modules)
    interface = [
        (name, module)
        for name, module in modules.items()
        if hf.uses_interface(module) and owners[name] and all(_over_tokens(owner) for owner in owners[name])
    ]
    found = Survey(leaking=_leaking(modules))
    if route != "hooks" and interface:
        found.interface = _all_or_none(interface, matches, route)
    if not found.interface and route != "interface":
        found.hooks = [
            (name, module)
            for name, module in modules.items()
            if (matches(name, module) if matches else name.split(".")[-1] == "self_attn" and _may_hook(owners[name]))
        ]
    if not found.interface and not found.hooks:
        raise ValueError(_nothing_found(model, modules, interface, route, matches is not None))
    guard.refuse_scripted(module for _, module in (*found.interface, *found.hooks))
    for name, module in found.interface:
        for owner in owners[name]:
            if not hf.supports_sdpa(owner):
                raise ValueError(
                    f"{type(owner).__name__} does not support sdpa in Transformers "
                    f"({hf.why_no_sdpa(owner, module)}), so packed attention cannot take its place; train it unpacked"
                )
        kind = hf.implementation(module.config)
        if kind is not None and kind != hf.implementation(owners[name][-1].config):
            found.of_another_kind[name] = kind
        for part in (*owners[name], module):
            if part.config not in _Identity(found.configs):
                found.configs.append(part.config)
    found.outer = _outer_forwards(modules, [name for name, _ in (*found.interface, *found.hooks)])
    guard.refuse_scripted(found.outer)
    found.encoder_decoder = next((type(m).__name__ for m in found.outer if hf.is_encoder_decoder(m)), "")
    return found


class _Identity:
    """Membership by identity: configs compare by value."""

    def __init__(self, items: list[Any]) -> None:
        self.ids = {id(item) for item in items}

    def __contains__(self, item: object) -> bool:
        return id(item) in self.ids


def _parents(name: str) -> list[str]:
    """Qualified names from the root to the module's parent."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts))]


def _owners(modules: dict[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """For each module the Transformers models around it, outermost first."""
    return {name: [modules[parent] for parent in _parents(name) if hf.is_hf_model(modules[parent])] for name in modules}


def _over_tokens(model: nn.Module) -> bool:
    return hf.takes_tokens(model) and any(
        name in inspect.signature(model.forward).parameters for name in _TOKEN_PARAMETERS
    )


def _may_hook(owners: list[nn.Module]) -> bool:
    """A vision or audio tower's self_attn is not hooked: its rows are no tokens of the packed sequence."""
    return all(_over_tokens(owner) for owner in owners)


def _all_or_none(
    interface: list[tuple[str, nn.Module]], matches: Callable[[str, nn.Module], bool] | None, route: str
) -> list[tuple[str, nn.Module]]:
    if matches is None:
        return interface
    chosen = [(name, module) for name, module in interface if matches(name, module)]
    if chosen and len(chosen) < len(interface):
        raise ValueError(
            f"match selects {len(chosen)} of {len(interface)} attention modules, but the interface route switches all "
            f"of them (left out: {_left_out(interface, chosen)}); use route='hooks' with this match"
        )
    return chosen


def _left_out(interface: list[tuple[str, nn.Module]], chosen: list[tuple[str, nn.Module]]) -> str:
    names = {name for name, _ in chosen}
    return next(name for name, _ in interface if name not in names)


def _outer_forwards(modules: dict[str, nn.Module], attention: list[str]) -> list[nn.Module]:
    """The root, and every module on the way to attention that takes tokens (position_ids where nothing above does)."""
    on_the_way = sorted(
        {parent for name in attention for parent in _parents(name)}, key=lambda name: len(_parents(name))
    )
    outer: dict[str, nn.Module] = {}
    takes_tokens: set[str] = set()
    for name in on_the_way:
        parameters = inspect.signature(modules[name].forward).parameters
        above = any(parent in takes_tokens for parent in _parents(name))
        tokens = any(token in parameters for token in _TOKEN_PARAMETERS)
        if tokens:
            takes_tokens.add(name)
        if name == "" or tokens or ("position_ids" in parameters and not above):
            outer[name] = modules[name]
    outer.setdefault("", modules[""])
    return list(dict.fromkeys(outer.values()))


def leaking_layers(model: nn.Module) -> list[str]:
    """Names of the layers of a model that mix tokens without attention."""
    return _leaking(dict(model.named_modules()))


def _leaking(modules: dict[str, nn.Module]) -> list[str]:
    """Layers that mix neighbouring tokens without attention, by class name or by a convolution over tokens in them."""
    names: list[str] = []
    for name, module in modules.items():
        if not name or _holds_layers(module):
            continue
        kind = type(module).__name__
        convolves = any(isinstance(part, nn.Conv1d) and part.kernel_size[0] > 1 for part in module.children())
        alone = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
        state_space = _STATE_SPACE.search(kind) and not _MIXES_NO_TOKENS.search(kind)
        if (convolves or alone or state_space) and not any(name.startswith(other + ".") for other in names):
            names.append(name)
    return names


def _holds_layers(module: nn.Module) -> bool:
    """A model, or a block around a mixing layer: it may be named for its state-space layers but is not one itself."""
    return hf.is_hf_model(module) or any(
        isinstance(part, nn.ModuleList)
        or _ATTENTION_LIKE.search(type(part).__name__)
        or (_STATE_SPACE.search(type(part).__name__) and not _MIXES_NO_TOKENS.search(type(part).__name__))
        for part in module.children()
    )


def _nothing_found(model: nn.Module, modules: dict[str, nn.Module], interface: list, route: str, matched: bool) -> str:
    like = [
        f"{name} ({type(module).__name__})"
        for name, module in modules.items()
        if name and looks_like_attention(name, module)
    ]
    saw = "; it has no attention-like modules either" if not like else f"; attention-like modules it has: {few(like)}"
    what = f"model: {type(model).__name__} has no attention modules that route={route!r} can take"
    if matched:
        what = f"match selects none of the modules of {type(model).__name__}"
    cure = "name them with match=, a suffix of the qualified name such as match='attn'"
    if route == "interface" and not interface:
        cure = "it is not on Transformers' attention interface, so use route='hooks', and match= to name them"
    return f"{what}{saw}; {cure}"


def looks_like_attention(name: str, module: nn.Module) -> bool:
    if re.search(r"Norm|Dropout|Embedding", type(module).__name__):
        return False
    named = _ATTENTION_LIKE.search(name.split(".")[-1]) and next(module.parameters(), None) is not None
    return bool(named or _ATTENTION_LIKE.search(type(module).__name__))


def few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
