"""The part of bench.audit that needs the CUDA plug-in, in a process of its own: compiles an engine's step for a GPU.

    python -m bench.audit_compile REQUEST DUMP_FOLDER        REQUEST: JSON of a Request

Prints a line of JSON a case: the kernels of the forward, of the greedy sampler and of the one with top-k and top-p, and
what else the compiler knows.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from bench.audit_cases import ITEM, Case, experts_of, spec_of, traffic_of
from bench.hlo import Traffic, parse
from jaxcb.config import EngineConfig
from jaxcb.devices import AXIS, CUT, PAGES, WHOLE, Placement
from jaxcb.engine.gpu_memory import Sizes, account, forward_bytes
from jaxcb.engine.sizing import backend_of, buckets_of, resolve_config, shape_of
from jaxcb.models import ModelSpec, param_shapes
from jaxcb.models.fused import fold_norms
from jaxcb.models.parallel import TensorParallel, part_of, spec_of_part
from jaxcb.sampling import Tier
from jaxcb.step.batch import SlotState, StepLayout
from jaxcb.step.buckets import Bucket
from jaxcb.step.controls import ControlLayout
from jaxcb.step.program import StepProgram
from jaxcb.step.runner import lower_forward
from jaxcb.step.samplers import Samplers
from jaxcb.step.shape import RunnerShape, kv_dtype, kv_shape
from pallas_kernels.deviceless import memory_bytes, target_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be compiled. ``rows``: decode steps; ``tokens``: the budget, a mixed step."""

    target: str
    model: str
    num_layers: int | None
    rows: tuple[int, ...]
    tokens: int
    context: int
    fast_norm: bool
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False


class Step:
    """The engine's programs for a described GPU: as :class:`jaxcb.step.runner.Runner` lowers them, on abstract
    arguments, with pages that fill the GPU. Of a model that is cut over several, what one has of it."""

    def __init__(self, request: Request, spec: ModelSpec, mesh: jax.sharding.Mesh):
        self.request, self.spec, self._mesh = request, spec, mesh
        self._whole = request.enable_expert_parallel
        self.placement = Placement(tuple(mesh.devices.flat), expert_parallel=self._whole)
        self.part = spec_of_part(spec, self.placement.size, expert_parallel=self._whole)
        self.parallel = TensorParallel(self.placement.size, spec.vocab_size, expert_parallel=self._whole)
        num_seqs, page_size = max(*request.rows, 256), EngineConfig.page_size
        sizes = Sizes(self.part, num_seqs, request.tokens, spec.max_position, page_size, ITEM)
        allowed = int(EngineConfig.gpu_memory_utilization * memory_bytes(request.target))
        weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.params)) // self.placement.size
        config = EngineConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=request.tokens,
            decode_buckets=request.rows,
            kv_cache_memory_bytes=account(allowed, weights, sizes).for_pages,
            fast_norm=request.fast_norm,
            tensor_parallel_size=request.tensor_parallel_size,
            enable_expert_parallel=request.enable_expert_parallel,
        )
        self.config = resolve_config(config, spec, jnp.dtype(jnp.bfloat16))
        self.shape: RunnerShape = shape_of(self.config)
        self.backend = backend_of(self.config)
        self.controls = ControlLayout(spec.vocab_size, self.shape.max_model_len)

    def cases(self) -> list[Case]:
        """The buckets that the engine has of those asked for."""
        buckets = list(buckets_of(self.config))
        wanted = [bucket for bucket in buckets if bucket.decode_only and bucket.num_tokens in self.request.rows]
        mixed = max(bucket for bucket in buckets if not bucket.decode_only)
        return [Case(bucket, self.request.context) for bucket in (*wanted, mixed)]

    def forward(self, bucket: Bucket) -> Compiled:
        layout = StepLayout(bucket, self.shape.table_width, self.shape.num_slots)
        program = StepProgram(
            self.part,
            layout,
            self.shape.page_size,
            self.backend,
            fast_norm=self.request.fast_norm,
            parallel=self.parallel,
        )
        return lower_forward(program, self.params, self.pages, self.state, self.placement).compile()

    def sampler(self, bucket: Bucket, tier: Tier) -> Compiled:
        samplers = Samplers(
            self.part,
            self.backend,
            self.controls,
            jnp.bfloat16,
            processed=False,
            deterministic=False,
            placement=self.placement,
            parallel=self.parallel,
        )
        jobs = samplers.jobs(self.params, self.state, [bucket.num_seqs], [])
        job = next(job for job in jobs if job.name == f"sample {tier.name.lower()} {bucket.num_seqs}")
        return job.lower().compile()

    @functools.cached_property
    def params(self) -> Any:
        params = param_shapes(self.spec, jnp.bfloat16)
        if self.request.fast_norm:
            params = jax.eval_shape(fold_norms, params)
        return jax.tree.map_with_path(self._cut, params) if self.placement.size > 1 else self._abstract(params)

    @functools.cached_property
    def pages(self) -> jax.ShapeDtypeStruct:
        dtype = kv_dtype(jnp.dtype(jnp.bfloat16), self.backend)
        return self._abstract(jax.ShapeDtypeStruct(kv_shape(self.part, self.shape, self.placement.size), dtype), PAGES)

    @functools.cached_property
    def state(self) -> Any:
        at_rest = functools.partial(SlotState.at_rest, self.shape.num_slots, self.shape.table_width, self.controls)
        return self._abstract(jax.eval_shape(at_rest))

    def traffic(self, case: Case) -> list[Traffic]:
        shape = self.shape
        size, num_tokens = self.placement.size, case.bucket.num_tokens
        experts = experts_of(self.part, num_tokens, size, expert_parallel=self._whole)
        sizes = (shape.num_pages + 1, shape.page_size, shape.table_width)
        return traffic_of(self.part, case, self.request.target, *sizes, experts)

    def _abstract(self, tree: Any, partition: jax.sharding.PartitionSpec = WHOLE) -> Any:
        sharding = jax.sharding.NamedSharding(self._mesh, WHOLE if self.placement.size == 1 else partition)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def _cut(self, path: Any, whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """A parameter as the engine cuts it."""
        keys, size = tuple(key.key for key in path), self.placement.size
        part = jax.eval_shape(lambda x: part_of(keys, x, self.spec, size, 0, expert_parallel=self._whole), whole)
        if part is None:
            return self._abstract(whole)
        return self._abstract(jax.ShapeDtypeStruct((size, *part.shape), part.dtype), CUT)


def facts(compiled: Compiled, traffic: list[Traffic], dump: Path) -> dict[str, Any]:
    """What is known of a compiled program."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "the compiler reports both"
    program = parse(text, traffic)
    thunks = max(dump.glob("*thunk_sequence_after_thunk_passes*.txt"), key=lambda path: path.stat().st_mtime)
    return {
        "kernels": [
            [kernel.name, [str(shape) for shape in kernel.outputs], kernel.read, kernel.written]
            for kernel in program.kernels
        ],
        "control_flow": program.control_flow,
        "launches": re.findall(r"^\d+: (k\w+)", thunks.read_text(), re.M),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }


def main() -> None:
    request, dump = Request(**json.loads(sys.argv[1])), Path(sys.argv[2])
    request = dataclasses.replace(request, rows=tuple(request.rows))
    spec = spec_of(request.model, request.num_layers)
    with target_mesh(request.target, request.tensor_parallel_size, AXIS) as mesh:
        step = Step(request, spec, mesh)
        for case in step.cases():
            began = time.perf_counter()
            bucket = case.bucket
            found = {
                "bucket": dataclasses.asdict(bucket),
                "pool_bytes": step.pages.size * step.pages.dtype.itemsize // step.placement.size,
                "most_temp_bytes": forward_bytes(step.part, bucket.num_tokens, bucket.num_seqs, ITEM),
                "forward": facts(step.forward(bucket), step.traffic(case), dump),
                "sampler": facts(step.sampler(bucket, Tier.GREEDY), [], dump),
                "truncated": facts(step.sampler(bucket, Tier.TRUNCATED), [], dump),
            }
            print(json.dumps(found | {"seconds": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
