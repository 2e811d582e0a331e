"""Over two hosts with whole experts on each, everything that decides an answer does so as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import sensitive_params
from tests.hosts.process import save
from tests.hosts.run import free_address, hosts
from tests.parallel.cut import MIXTURE


@pytest.mark.slow  # test_two_hosts has the short form
def test_whatever_decides_an_answer_does_so_as_on_one_device(tmp_path: Path):
    file, address = tmp_path / "params.pickle", free_address()
    save(sensitive_params(MIXTURE, seed=3), file)
    with hosts([("-m", "tests.hosts.answers", str(rank), address, str(file)) for rank in range(2)]) as pair:
        whole, over_hosts = pair[0].read()["found"]
        for name, expected in whole.items():
            assert over_hosts[name] == expected, name
        assert whole["the same bits"]
        assert len({str(whole[name]) for name in whole}) == len(whole), "equal answers would mean nothing"
        for host in pair:
            assert host.wait(20) == 0, host.log()
