import random

import pytest

from jaxcb.text import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop)
    shown = ""
    for piece in pieces:
        text, matched = matcher.add(piece)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None


def oracle(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """Read character by character: the first complete stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.choice([0, 1, 1, 2, 3, 7])
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def test_without_stop_strings_text_passes_through():
    matcher = StopMatcher((), False)
    assert matcher.add("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_stop_string_across_pieces_is_never_shown_in_part():
    matcher = StopMatcher(("END",))
    assert matcher.add("Hello E") == ("Hello ", None)
    assert matcher.add("N") == ("", None)
    assert matcher.add("T") == ("ENT", None)
    assert matcher.add("RY.EN") == ("RY.", None)
    assert matcher.add("D and more") == ("", "END")


def test_stop_string_is_kept_when_asked_for():
    assert run(("END",), ["go on E", "ND now"], include_stop=True) == ("go on END", "END")


def test_held_text_is_shown_at_the_end():
    assert run(("END",), ["wait, E", "N"]) == ("wait, EN", None)


def test_of_two_that_begin_together_the_shorter_is_complete_first():
    assert run(("stop", "stop\n"), ["please st", "op\nnow"]) == ("please ", "stop")


def test_of_two_that_end_together_the_longer_wins_in_any_order():
    for stops in (("b", "ab"), ("ab", "b")):
        assert run(stops, ["xa", "b"]) == ("x", "ab")


def test_near_miss_of_one_does_not_hide_another():
    assert run(("stop", "sto~"), ["a sto", "~ b"]) == ("a ", "sto~")


def test_match_inside_a_failed_longer_match_is_found():
    assert run(("aab",), ["aaab"]) == ("a", "aab")


def test_unarmed_matcher_passes_complete_stop_strings_but_sees_those_that_end_later():
    matcher = StopMatcher(("END",))
    text, matched = matcher.add("END EN", armed=False)
    assert (text, matched) == ("END ", None)
    assert matcher.add("D", armed=True) == ("", "END")


@pytest.mark.parametrize("seed", range(20))
def test_result_depends_on_the_text_and_not_on_the_pieces(seed):
    rng = random.Random(seed)
    for _ in range(200):
        stops = tuple("".join(rng.choices("ab~", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4)))
        text = "".join(rng.choices("ab~c", k=rng.randint(0, 40)))
        expected, stop = oracle(stops, text)
        pieces = cut(text, rng)
        assert run(stops, pieces) == (expected, stop), (seed, stops, pieces)
        assert run(stops, pieces, include_stop=True) == (expected + (stop or ""), stop), (seed, stops, pieces)


@pytest.mark.parametrize("seed", range(5))
def test_no_more_is_held_back_than_may_become_a_stop_string(seed):
    rng = random.Random(seed)
    for _ in range(200):
        stops = tuple("".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(3))
        text = "".join(rng.choices("abc", k=20))
        matcher, shown = StopMatcher(stops), ""
        for index, char in enumerate(text, start=1):
            piece, matched = matcher.add(char)
            shown += piece
            if matched:
                break
            held = text[len(shown) : index]
            assert not held or any(stop.startswith(held) for stop in stops), (seed, stops, text)


def test_long_repetitive_stop_string_costs_linear_time():
    """Each character advances the automaton once, and falls back at most as often as it advanced."""
    stop = "a" * 50_000 + "b"
    matcher = StopMatcher((stop,))
    steps = 0
    original = matcher._step

    def counting(char: str) -> str | None:
        nonlocal steps
        steps += 1
        return original(char)

    matcher._step = counting
    shown = "".join(matcher.add("a" * 10)[0] for _ in range(6_000))
    assert steps == 60_000
    assert len(shown) == 10_000
