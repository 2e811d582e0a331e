"""Published serving systems as settings of this engine: one name for the simulator, a script and the server.

A preset sets what makes a system what it is (who is batched with whom, how memory is promised, who goes first), and the
sizes that its authors give where these are part of the idea. What it leaves open is chosen for the machine as always.
Systems of several machines have ``pools`` besides: those run in the simulator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxcb.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pools:
    """Prefill and decode on separate machines; KV goes from the one to the other over the network."""

    prefill_part: float = 0.5
    """Part of the cards that prefill; each pool gets one at least."""
    decode_gpu: str | None = None
    """Another kind of card for the decode pool."""
    store_gib: float = 0.0
    """Host memory a card that keeps KV of prompts for the whole cluster; 0: none."""
    early_rejection: bool = False
    """Turn a request away at its arrival if its first token is predicted to come too late."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """One system."""

    source: str
    """Where its design is described."""
    models: str
    """What of it is modelled, and what is not."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of EngineConfig."""
    padded: bool = False
    """Sequences that have ended are computed on as padding until their batch is done."""
    pools: Pools | None = None


PRESETS: Mapping[str, Preset] = {
    "fastertransformer": Preset(
        source="NVIDIA FasterTransformer 5; the baseline of Orca (OSDI 2022), section 6",
        models="static batches: nobody joins or leaves until the longest answer has ended, KV reserved at full length, "
        "prompts first, ended rows ride along as padding",
        settings={
            "batching": "static",
            "reservation": "full",
            "prefill_first": True,
            "enable_prefix_caching": False,
            "run_ahead": False,
        },
        padded=True,
    ),
    "orca": Preset(
        source="Yu et al., Orca, OSDI 2022, sections 3.1 and 4.2",
        models="iteration-level scheduling: whole prompts join decodes in a step, first come first served; KV for "
        "max_model_len tokens is reserved at admission",
        settings={"reservation": "full", "enable_chunked_prefill": False, "enable_prefix_caching": False},
    ),
    "vllm": Preset(
        source="Kwon et al., PagedAttention, SOSP 2023, sections 4.3 and 4.5; vLLM 0.2's scheduler",
        models="paged KV, steps of whole prompts before steps of decodes, preemption of the newest by recomputing",
        settings={
            "prefill_first": True,
            "enable_chunked_prefill": False,
            "preemption": "recompute",
            "enable_prefix_caching": False,
            "run_ahead": False,
        },
    ),
    "vllm-v1": Preset(
        source="vLLM 0.9 and later: vllm/v1/core/sched/scheduler.py, defaults of its documentation",
        models="no phases: decodes, then chunks of prompts in one budget of 2,048; prefix caching, recompute, async "
        "scheduling",
        settings={"max_num_batched_tokens": 2048, "preemption": "recompute", "long_prefill_token_threshold": 0},
    ),
    "sarathi": Preset(
        source="Agrawal et al., Sarathi-Serve, OSDI 2024, sections 4.1 to 4.3",
        models="stall-free batches: decodes first, then chunks under a budget of 512, which bounds the gap of tokens",
        settings={
            "max_num_batched_tokens": 512,
            "preemption": "recompute",
            "long_prefill_token_threshold": 0,
            "enable_prefix_caching": False,
        },
    ),
    "fastgen": Preset(
        source="Holmes et al., DeepSpeed-FastGen, arXiv 2401.08671, section 3 (Dynamic SplitFuse)",
        models="every step is filled to the same number of tokens: long prompts are split, short ones put together, "
        "the last one trimmed so that nothing is padded",
        settings={
            "max_num_batched_tokens": 2048,
            "exact_fill": True,
            "long_prefill_token_threshold": 0,
            "preemption": "recompute",
            "enable_prefix_caching": False,
        },
    ),
    "tensorrt-llm-guaranteed-no-evict": Preset(
        source="TensorRT-LLM, documentation of CapacitySchedulerPolicy: GUARANTEED_NO_EVICT (the default)",
        models="in-flight batching under a budget of 8,192; a request is admitted when the KV of every running one is "
        "certain to its end",
        settings={
            "max_num_batched_tokens": 8192,
            "reservation": "guaranteed",
            "page_size": 32,
            "long_prefill_token_threshold": 0,
        },
    ),
    "tensorrt-llm-max-utilization": Preset(
        source="TensorRT-LLM, documentation of CapacitySchedulerPolicy: MAX_UTILIZATION",
        models="in-flight batching under a budget of 8,192; as many as fit now, recomputed when memory runs out",
        settings={
            "max_num_batched_tokens": 8192,
            "reservation": "optimistic",
            "admission_watermark": 0.0,
            "preemption": "recompute",
            "page_size": 32,
            "long_prefill_token_threshold": 0,
        },
    ),
    "tgi": Preset(
        source="Hugging Face text-generation-inference 3: router/src/infer, launcher arguments",
        models="prompts run in steps of their own, of up to 4,096 tokens, once waiting requests are 0.3 of the running "
        "ones or 20 steps have passed; prompt and max_tokens are counted at admission",
        settings={
            "prefill_first": True,
            "waiting_served_ratio": 0.3,
            "max_waiting_steps": 20,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 128,
            "reservation": "guaranteed",
            "long_prefill_token_threshold": 0,
            "run_ahead": False,
        },
    ),
    "lmdeploy": Preset(
        source="LMDeploy TurboMind, documentation of TurbomindEngineConfig",
        models="a persistent batch of 128 slots; at most 8,192 tokens an iteration, prompts split to fit; pages of 64",
        settings={
            "max_num_seqs": 128,
            "max_num_batched_tokens": 8192,
            "page_size": 64,
            "preemption": "recompute",
            "long_prefill_token_threshold": 0,
            "enable_prefix_caching": False,
        },
    ),
    "sglang": Preset(
        source="Zheng et al., SGLang, NeurIPS 2024, section 3 (RadixAttention, longest prefix match first)",
        models="a prefix tree over pages, requests in the order of their cached prefix, prefill before decode in "
        "chunks of 8,192, overlapped scheduling",
        settings={
            "policy": "prefix",
            "prefill_first": True,
            "max_num_batched_tokens": 8192,
            "long_prefill_token_threshold": 0,
            "preemption": "recompute",
        },
    ),
    "llama.cpp": Preset(
        source="llama.cpp server, documentation of --parallel, --cont-batching, --slot-prompt-similarity",
        models="four slots, each with room for a whole context; a slot keeps its last prompt, and a request that "
        "begins alike reuses it; batches of 2,048 tokens",
        settings={
            "max_num_seqs": 4,
            "max_num_batched_tokens": 2048,
            "reservation": "full",
            "long_prefill_token_threshold": 0,
            "run_ahead": False,
        },
    ),
    "distserve": Preset(
        source="Zhong et al., DistServe, OSDI 2024, sections 3 and 4",
        models="separate prefill and decode cards; a decode card pulls the KV of a prompt when it has room, over the "
        "network. Placement is by count, not searched",
        settings={"enable_prefix_caching": False, "long_prefill_token_threshold": 0, "preemption": "recompute"},
        pools=Pools(),
    ),
    "splitwise": Preset(
        source="Patel et al., Splitwise, ISCA 2024, sections 4 and 5 (Splitwise-HA)",
        models="prompts on the card that was asked for, decodes on A100s, which are cheaper and draw less; cost and "
        "power are counted",
        settings={"enable_prefix_caching": False, "long_prefill_token_threshold": 0, "preemption": "recompute"},
        pools=Pools(decode_gpu="a100"),
    ),
    "mooncake": Preset(
        source="Qin et al., Mooncake, FAST 2025, sections 5 and 6",
        models="prefill and decode cards around one store of prompts' KV in host memory; a prompt goes where its first "
        "token is predicted to come first, and is turned away if that is too late",
        settings={"long_prefill_token_threshold": 0, "preemption": "recompute"},
        pools=Pools(store_gib=128.0, early_rejection=True),
    ),
}


def find_preset(name: str) -> Preset:
    """
    Raises:
        ConfigError: there is no such preset; the message names those that there are.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}", param="preset")
    return PRESETS[name]


def engine_settings(name: str) -> dict[str, Any]:
    """Fields of EngineConfig for a system that one engine can be.

    Raises:
        ConfigError: there is no such preset, or it needs several engines.
    """
    preset = find_preset(name)
    if preset.pools is not None:
        single = ", ".join(name for name, preset in PRESETS.items() if preset.pools is None)
        raise ConfigError(
            f"preset {name!r} is a cluster of several engines: `python -m jaxcb.sim compare` runs it. One can be "
            f"{single}",
            param="preset",
        )
    return dict(preset.settings)
