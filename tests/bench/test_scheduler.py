from bench.scheduler import Loaded, measure


def test_everything_decodes_while_it_is_measured():
    loaded = Loaded(num_running=8, num_waiting=5, policy="fcfs", seed=0)
    for _ in range(3):
        loaded.step()
    assert (loaded.scheduler.num_running, loaded.scheduler.num_waiting) == (8, 5)
    assert loaded.scheduler.plan().decode_only


def test_each_case_has_its_time():
    times = measure([(1, 0), (4, 10)], "sjf", num_steps=2, rounds=2)
    assert set(times) == {(1, 0), (4, 10)} and all(us > 0 for us in times.values())
