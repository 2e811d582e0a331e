"""One side of a pair as a process of its own, to be killed: ``python -m tests.disagg.process prefill|decode ...``.

It writes a line of JSON whenever something has happened: {"port": ...}, {"pages": ...}, {"tokens": ...}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from jaxcb.config import EngineConfig
from jaxcb.disagg import Disaggregated, PromptService, roles
from jaxcb.disagg.connector import connector_of
from jaxcb.disagg.identity import identity_of
from jaxcb.disagg.remote import RemoteLink
from jaxcb.disagg.server import PrefillServer
from jaxcb.engine import Engine
from jaxcb.request import Request, SamplingParams
from tests.engine.conftest import SPEC, sensitive_params
from tests.text.small_tokenizers import byte_level


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def small_engine() -> Engine:
    """As tests.engine.conftest makes them."""
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=700,
        num_kv_pages=400,
        decode_buckets=(),
        mixed_buckets=(),
        kv_transfer=True,
    )
    engine = Engine("small", SPEC, sensitive_params(SPEC, seed=3), byte_level(), config)
    engine.compile(progress=False)
    engine.run()
    return engine


def prefill(args: argparse.Namespace) -> None:
    engine = small_engine()
    launch = engine._runner.launch

    def slowly(plan):
        time.sleep(args.delay_s)
        return launch(plan)

    engine._runner.launch = slowly
    connector = connector_of(args.connector)
    server = PrefillServer(
        PromptService(engine), identity_of(engine, args.connector), connector, ("127.0.0.1", args.port)
    )
    say(port=server.address[1])
    time.sleep(600)


def decode(args: argparse.Namespace) -> None:
    engine = small_engine()
    connector = connector_of(args.connector)
    link = RemoteLink(engine, identity_of(engine, args.connector), connector, ("127.0.0.1", args.port))
    if args.no_acks:
        link.received = lambda request_id, num_pages: None
    roles.takes_prompts = lambda **load: False
    engine.handovers.incoming.take_back = lambda *arguments: None
    front = Disaggregated(engine, [link])
    sampling = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    streams = [
        front.submit_blocking(
            Request(
                request_id=f"{i}", prompt_token_ids=[(7 * i * j + 3 * j) % 250 for j in range(500)], sampling=sampling
            )
        )
        for i in range(1, 5)
    ]
    while not engine.handovers.incoming.totals.pages:
        time.sleep(0.001)
    say(pages=engine.handovers.incoming.totals.pages)
    if args.no_acks:
        time.sleep(600)
    for output in streams[0]:
        say(tokens=len(output.token_ids))
    time.sleep(600)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("port", type=int)
    parser.add_argument("--connector", default="shm")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--no-acks", action="store_true")
    sys.exit({"prefill": prefill, "decode": decode}[(given := parser.parse_args()).role](given))
