"""Tokens to text: stop strings over several tokens, end tokens, deltas that add up to the whole."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from nanoserve.engine.outputs import RequestTracker, TokenDecoder
from nanoserve.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    SequenceUpdate,
    Status,
    TokenLogprob,
)


class _Letters:
    """Token 0 is a special end token; token k reads as the k-th letter."""

    special_ids = frozenset({0})
    markers: Collection[int] = ()
    vocab_size = 27

    def decode(self, token_ids: SequenceOf[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token - 1) for token in token_ids if token)

    def is_byte(self, token_id: int) -> bool:
        return False


_LETTERS = _Letters()


def _ids(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) - ord("a") + 1 for letter in text)


class _Life:
    """A request with one sample whose tokens are fed by hand."""

    def __init__(self, params: SamplingParams, tokenizer: TokenDecoder = _LETTERS) -> None:
        self.request = Request("r", _ids("prompt"), params, seed=0, end_tokens=(0,))
        self.tracker = RequestTracker(self.request, tokenizer, prompt="prompt")
        self.now = 0.0
        self.sequence = Sequence(
            0, self.request, 0, list(self.request.prompt), status=Status.DECODE
        )

    def feed(self, *tokens: int, finish: FinishReason | None = None) -> bool:
        for token in tokens:
            self.sequence.tokens.append(token)
            self.sequence.logprobs.append(TokenLogprob(token, -1.0, 1))
        if finish is not None:
            self.sequence.move_to(Status.FINISHED)
            self.sequence.finish_reason = finish
            if finish is FinishReason.STOP:
                self.sequence.stop_token = tokens[-1]
        self.now += 2.0
        if self.sequence.first_token_time is None:
            self.sequence.first_token_time = self.now
        return self.tracker.take(SequenceUpdate("r", 0, tokens, self.sequence), self.now)

    def whole(self) -> RequestOutput:
        return self.tracker.whole()


def test_a_stop_string_over_several_tokens_is_cut_out_and_ends_the_sample() -> None:
    life = _Life(SamplingParams(stop=("xyz",)))
    shown = ""
    for letter in "abxyxy":
        assert not life.feed(*_ids(letter))
        shown += life.tracker.delta().outputs[0].text
    assert shown == "abxy", "what may still become the stop string is held back"
    assert life.feed(*_ids("z")), "the engine must be told"
    output = life.whole().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("abxy", "stop", "xyz")
    assert life.whole().finished


def test_what_was_held_back_is_shown_when_the_sample_ends_otherwise() -> None:
    life = _Life(SamplingParams(stop=("xyz",)))
    life.feed(*_ids("axy"))
    life.feed(*_ids("b"), finish=FinishReason.LENGTH)
    assert life.whole().outputs[0].text == "axyb"
    life = _Life(SamplingParams(stop=("xyz",)))
    life.feed(*_ids("axy"), finish=FinishReason.LENGTH)
    assert life.whole().outputs[0].text == "axy"


def test_stop_strings_wait_for_min_tokens() -> None:
    life = _Life(SamplingParams(stop=("b",), min_tokens=2))
    assert not life.feed(*_ids("bb"))
    assert life.feed(*_ids("b"))
    assert life.whole().outputs[0].text == "bb"


def test_the_text_of_a_token_that_stops_is_left_out_but_its_id_is_there() -> None:
    for params, stop in ((SamplingParams(), 0), (SamplingParams(stop_token_ids=(5,)), 5)):
        life = _Life(params)
        life.feed(*_ids("ab"), stop, finish=FinishReason.STOP)
        output = life.whole().outputs[0]
        assert (output.text, output.token_ids, output.stop_reason) == ("ab", (1, 2, stop), stop)


def test_deltas_add_up_to_the_whole() -> None:
    life = _Life(SamplingParams(logprobs=0))
    deltas = []
    for tokens in (_ids("ab"), (), _ids("c")):
        life.feed(*tokens)
        if life.tracker.has_news:
            deltas.append(life.tracker.delta())
    life.feed(0, finish=FinishReason.STOP)
    deltas.append(life.tracker.delta())
    assert [delta.outputs[0].text for delta in deltas] == ["ab", "c", ""]
    whole = life.whole().outputs[0]
    assert (
        sum((delta.outputs[0].token_ids for delta in deltas), ()) == whole.token_ids == (1, 2, 3, 0)
    )
    assert sum((delta.outputs[0].logprobs or () for delta in deltas), ()) == whole.logprobs
    assert deltas[-1].finished and deltas[-1].outputs[0].finish_reason == "stop"
    assert not any(delta.finished for delta in deltas[:-1])


_ = None
"""A token of a canvas that is not settled."""


def _draft(life: _Life, *canvas: int | None) -> tuple[str, tuple[tuple[int, int], ...]]:
    drafted = life.tracker.draft({0: canvas})
    assert drafted.draft and not drafted.finished
    (output,) = drafted.outputs
    assert output.token_ids == () and output.finish_reason is None
    return output.text, output.marks


def test_a_draft_is_the_text_of_a_canvas_with_a_sign_for_each_mask() -> None:
    life = _Life(SamplingParams())
    life.feed(*_ids("ab"))
    life.tracker.delta()
    life.sequence.stop_tokens = frozenset({0})
    assert _draft(life, 3, _, _, *_ids("de")) == ("c _ _de", ())
    assert _draft(life, _, 0, 3) == (" _", ()), "nothing of what an end token will cut"
    life.sequence.max_length = len(life.sequence.tokens) + 2
    assert _draft(life, *_ids("cde")) == ("cd", ()), "nothing beyond max_tokens"
    life.feed(*_ids("c"))
    assert life.tracker.delta().outputs[0].text == "c"
    assert life.whole().outputs[0].text == "abc"


def test_stop_strings_hold_nothing_back_in_a_draft_but_cut_it() -> None:
    life = _Life(SamplingParams(stop=("xyz",)))
    life.sequence.first_token_time = 0.0
    life.feed()
    assert _draft(life, *_ids("axyzb")) == ("a", ())
    life.feed(*_ids("ax"))
    assert life.tracker.delta().outputs[0].text == "a"
    assert _draft(life, *_ids("yb"), _) == ("xyb _", ())
    assert _draft(life, *_ids("yzb"), _) == ("", ())
    assert _draft(life, _, *_ids("yz")) == ("x _yz", ()), "a mask may become anything"
    assert life.feed(*_ids("yz"))


def test_marker_tokens_of_a_draft_have_a_place() -> None:
    life = _Life(SamplingParams(), _Marked())
    life.feed(*_ids("a"), 26)
    assert _draft(life, *_ids("b"), _, 26, *_ids("c")) == ("b _c", ((3, 26),))
    assert life.whole().outputs[0].marks == ((1, 26),)


def test_the_pace_is_known_before_the_end() -> None:
    life = _Life(SamplingParams())
    life.feed(*_ids("a"))
    assert life.whole().outputs[0].metrics.time_per_output_token is None
    life.feed(*_ids("b"))
    life.feed(*_ids("c"))
    metrics = life.whole().outputs[0].metrics
    assert (metrics.time_per_output_token, metrics.latency) == (2.0, None)


class _Marked(_Letters):
    """Token 26, which would be a z, is a marker."""

    special_ids = frozenset({0, 26})
    markers = (26,)


def test_marker_tokens_have_a_place_and_no_text() -> None:
    life = _Life(SamplingParams(), _Marked())
    deltas = []
    for tokens in ((26,), _ids("ab"), (*_ids("c"), 26, 26, *_ids("d")), (), (26,)):
        life.feed(*tokens)
        if life.tracker.has_news:
            deltas.append(life.tracker.delta().outputs[0])
    assert [(delta.text, delta.marks) for delta in deltas] == [
        ("", ((0, 26),)),
        ("ab", ()),
        ("cd", ((1, 26), (1, 26))),
        ("", ((0, 26),)),
    ]
    life.feed(0, finish=FinishReason.STOP)
    whole = life.whole().outputs[0]
    assert (whole.text, whole.marks) == ("abcd", ((0, 26), (3, 26), (3, 26), (4, 26)))


def test_no_stop_string_reaches_over_a_marker_token() -> None:
    life = _Life(SamplingParams(stop=("ab",)), _Marked())
    assert not life.feed(*_ids("a"), 26, *_ids("b"))
    assert life.feed(*_ids("ab"))
    whole = life.whole().outputs[0]
    assert (whole.text, whole.marks, whole.stop_reason) == ("ab", ((1, 26),), "ab")


class _Counted(_Letters):
    """Counts how often it is asked for a text."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: SequenceOf[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += 1
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def _fed(params: SamplingParams, count: int) -> tuple[_Life, _Counted]:
    tokenizer = _Counted()
    life = _Life(params, tokenizer)
    tokenizer.decoded = 0  # the prompt's end is decoded when the request comes
    for place in range(count):
        life.feed(1 + place % 26)
    return life, tokenizer


def test_tokens_that_nobody_reads_before_the_end_are_decoded_together() -> None:
    for count in (1, 300):
        life, tokenizer = _fed(SamplingParams(), count)
        assert tokenizer.decoded == 0
        life.feed(0, finish=FinishReason.STOP)
        text = "".join(chr(ord("a") + place % 26) for place in range(count))
        assert life.whole().outputs[0].text == text
        assert tokenizer.decoded <= 3, "the window, its new beginning, and the end"


def test_a_stop_string_is_found_although_nobody_reads() -> None:
    life, tokenizer = _fed(SamplingParams(stop=("yz",)), 25)
    assert tokenizer.decoded >= 25
    assert life.feed(26)


def test_a_token_that_is_read_at_once_is_decoded_about_once() -> None:
    life, tokenizer = _fed(SamplingParams(), 0)
    text = ""
    for place in range(300):
        life.feed(1 + place % 26)
        text += life.tracker.delta().outputs[0].text
    assert text == life.whole().outputs[0].text and len(text) == 300
    assert tokenizer.decoded < 1.2 * 300


def test_deltas_that_are_read_late_have_the_text_of_their_own_tokens() -> None:
    life, _ = _fed(SamplingParams(), 5)
    life.feed(0, finish=FinishReason.STOP)
    texts = []
    while life.tracker.has_news:
        texts.append(life.tracker.delta().outputs[0].text)
    assert texts == ["a", "b", "c", "d", "e", ""]
