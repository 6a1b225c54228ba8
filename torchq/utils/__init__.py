"""Leaf helpers. Imports only errors, torch, tqdm and the standard library."""

from torchq.utils.batches import check_batches, kept_batches
from torchq.utils.data import check_fields, parse_json, replacing, short_repr, why_no_model
from torchq.utils.modules import (
    calls_are_recorded,
    constant_while_tracing,
    copy_module,
    deployed_part,
    device_of,
    evaluating,
    is_torchs_own,
    plain_attention,
    set_submodule,
    state_kept,
    twin_of,
    uncompiled,
    undone_on_error,
    unfused_attention,
    untouched,
    unwrapped,
    watching,
)
from torchq.utils.names import (
    Pattern,
    check_pattern,
    matches,
    modules_with_names,
    pattern_text,
    qualified_name,
)
from torchq.utils.progress import item_count, progress_bar, progress_stages
from torchq.utils.random_state import RandomState, random_kept, repeated_draws
from torchq.utils.registry import Registry
from torchq.utils.text import bullets, markdown_table, table, wrap

__all__ = [
    "bullets",
    "calls_are_recorded",
    "Pattern",
    "RandomState",
    "Registry",
    "check_batches",
    "check_fields",
    "check_pattern",
    "constant_while_tracing",
    "copy_module",
    "deployed_part",
    "device_of",
    "evaluating",
    "is_torchs_own",
    "item_count",
    "kept_batches",
    "markdown_table",
    "matches",
    "modules_with_names",
    "parse_json",
    "pattern_text",
    "plain_attention",
    "progress_bar",
    "random_kept",
    "progress_stages",
    "qualified_name",
    "repeated_draws",
    "replacing",
    "set_submodule",
    "short_repr",
    "state_kept",
    "table",
    "twin_of",
    "uncompiled",
    "undone_on_error",
    "unfused_attention",
    "untouched",
    "unwrapped",
    "watching",
    "why_no_model",
    "wrap",
]
