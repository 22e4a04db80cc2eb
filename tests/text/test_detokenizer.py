import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.engine.outputs import Detokenizer, RequestTracker
from nanoserve.request import Request, SamplingParams, Sequence, SequenceUpdate, Status
from nanoserve.text.tokenizer import Tokenizer
from tests.text.building import PATIENT

TEXTS = [
    "The fox said hello.",
    "🦊 & 👩‍👩‍👧 你好,世界!",
    "naïve café\n\n  two blanks",
    "\ufffd is a character, too",
    "  lead",
]


def stream(
    tokenizer: Tokenizer, token_ids: list[int], prompt_ids: list[int] | None = None
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids or [])
    pieces = [detokenizer.push([token]) for token in token_ids]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_hold_half_a_character(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)
    assert not pieces[-1] or not text.isascii()


@PATIENT
@given(data=st.data())
def test_any_ids_stream_to_what_they_decode_to(tokenizer: Tokenizer, data: st.DataObject):
    # Beyond the vocabulary, too: embeddings are often padded, and such rows can be sampled.
    token = st.integers(0, tokenizer.vocab_size + 3)
    byte_or_token = st.one_of(st.integers(0, min(300, tokenizer.vocab_size)), token)
    pushes = data.draw(st.lists(st.lists(byte_or_token, max_size=4), max_size=24))
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(push) for push in pushes) + detokenizer.flush()
    assert text == tokenizer.decode([token for push in pushes for token in push])


@settings(PATIENT, max_examples=12)
@given(data=st.data())
def test_drafts_between_pieces_change_nothing(tokenizer: Tokenizer, data: st.DataObject):
    """Also in the midst of a character, whose other bytes the draft may hold."""
    ids = tokenizer.encode(data.draw(st.sampled_from(TEXTS)), add_special_tokens=False)
    request = Request("r", (ids[0],), SamplingParams(stop=("hello", "é\n")), seed=0)
    sequence = Sequence(0, request, 0, list(request.prompt), status=Status.DECODE)
    drafted, plain = RequestTracker(request, tokenizer), RequestTracker(request, tokenizer)
    for place, token in enumerate(ids[1:], 2):
        sequence.tokens.append(token)
        update = SequenceUpdate("r", 0, (token,), sequence)
        assert drafted.take(update, 0.0) == plain.take(update, 0.0)
        masks = st.lists(st.booleans(), min_size=len(ids) - place, max_size=len(ids) - place)
        rest = zip(ids[place:], data.draw(masks), strict=True)
        drafted.draft({0: [None if is_mask else token for token, is_mask in rest]})
        assert drafted.delta() == plain.delta()
    (output,) = drafted.whole().outputs
    if not output.stop_reason:
        unmasked = plain.draft({0: []}).outputs[0].text  # what is held back at the end
        assert tokenizer.decode(ids).endswith(output.text + unmasked)


@PATIENT
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁\ufffd")))
def test_any_text_streams_without_replacement_characters(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)


@PATIENT
@given(data=st.data())
def test_an_output_goes_on_where_its_prompt_ends(tokenizer: Tokenizer, data: st.DataObject):
    ids = tokenizer.encode(data.draw(st.sampled_from(TEXTS)) * 2, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    prompt = tokenizer.decode(ids[:cut])
    if tokenizer.is_byte(ids[max(cut - 1, 0)]):
        return  # a prompt of text never ends within a character
    output = "".join(stream(tokenizer, ids[cut:], ids[:cut]))
    assert prompt.rstrip("\ufffd") + output == tokenizer.decode(ids)


def test_an_output_behind_a_prompt_keeps_its_leading_blank(tokenizers):
    for kind in ("metaspace", "sentencepiece"):
        tokenizer = tokenizers[kind]
        prompt = tokenizer.encode("Once upon")
        output = tokenizer.encode("a time", add_special_tokens=False)
        assert "".join(stream(tokenizer, output, prompt)) == " a time"
        assert "".join(stream(tokenizer, output)) == "a time"


def test_special_tokens_have_no_text(tokenizer: Tokenizer):
    hello = tokenizer.encode("Hello", add_special_tokens=False)
    special = min(tokenizer.special_ids)
    ids = [special, *hello, special, special, *hello, special]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids)).replace(" ", "") == "HelloHello"


def test_the_time_per_token_does_not_grow(tokenizers):
    class Counting:
        special_ids: frozenset[int] = frozenset()
        markers = ()
        vocab_size = tokenizers["byte-level"].vocab_size
        longest = 0

        def decode(self, token_ids, *, skip_special_tokens=True):
            self.longest = max(self.longest, len(token_ids))
            return tokenizers["byte-level"].decode(
                token_ids, skip_special_tokens=skip_special_tokens
            )

        def is_byte(self, token_id):
            return False

    counting = Counting()
    ids = tokenizers["byte-level"].encode("The fox said hello to 🦊. " * 50)
    stream(counting, ids, ids)
    assert counting.longest <= 12


@pytest.mark.parametrize("kind", ["metaspace", "sentencepiece", "byte-level"])
def test_what_stands_before_a_marker_token_is_whole_and_comes_before_it(tokenizers, kind: str):
    tokenizer = tokenizers[kind]
    fox = tokenizer.encode("a 🦊", add_special_tokens=False)
    for ids, before in ((fox, "a 🦊"), (fox[:-1], "a \ufffd")):
        detokenizer = Detokenizer(tokenizer)
        pieces = "".join(detokenizer.push([token]) for token in ids) + detokenizer.cut()
        assert pieces.rstrip("\ufffd") == before.rstrip("\ufffd") and pieces.endswith(before[-1])
        after = "".join(
            detokenizer.push([token])
            for token in tokenizer.encode("the end", add_special_tokens=False)
        )
        assert (after + detokenizer.flush()).strip() == "the end"
