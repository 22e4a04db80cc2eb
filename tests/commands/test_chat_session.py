"""A conversation without a terminal: history, settings, a full context, saved files."""

import itertools
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoserve.commands.answers import LocalModel
from nanoserve.commands.chat_session import ChatSession, Draft, Steps
from nanoserve.commands.conversations import Message, find
from nanoserve.errors import ModelError, NanoserveError, RuntimeFailure, UsageError
from nanoserve.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from nanoserve.text.answers.forms import AnswerParser
from nanoserve.text.answers.harmony import HarmonyAnswers
from tests.commands.fake_llm import FakeLLM


def make_session(**settings: Any) -> tuple[ChatSession, list[str]]:
    notices: list[str] = []
    llm: Any = FakeLLM(max_model_len=settings.pop("max_model_len", 200))
    model = LocalModel("storyteller", lambda *_: llm, notices.append, settings.pop("seed", None))
    return ChatSession(model, notify=notices.append, **settings), notices


class Models:
    """Models of any name but "missing"; "broken" cannot be loaded, and Ctrl-C is pressed while
    "unwanted" is looked for or "unloaded" is loaded."""

    def __init__(self, *, max_model_len: int = 200) -> None:
        self._max_model_len = max_model_len

    def first(self) -> LocalModel:
        return self.open("storyteller")

    def open(self, name: str) -> LocalModel:
        if name == "missing":
            raise ModelError("no model is called missing")
        if name == "unwanted":
            raise KeyboardInterrupt

        def load(*_: object) -> Any:
            if name == "broken":
                raise ModelError("the weights are cut short")
            if name == "unloaded":
                raise KeyboardInterrupt
            return FakeLLM(name, max_model_len=self._max_model_len)

        return LocalModel(name, load, print, None)

    def listed(self) -> list[tuple[str, str]]:
        return [("storyteller", "8.3 MiB, bundled"), ("other", "1.0 GiB, hub cache")]


def fake(session: ChatSession) -> FakeLLM:
    """The model behind a session of ``make_session``."""
    llm: Any = session.model.llm  # type: ignore[attr-defined]
    return llm


def answer(session: ChatSession, question: str, steps: Steps = iter) -> str:
    return "".join(text for part, text in session.ask(question, steps) if part == "answer")


def first(count: int) -> Steps:
    """End a stream as Ctrl-C does: it ends after so many steps."""

    def steps(stream: Iterator[Any]) -> Iterator[Any]:
        return itertools.islice(stream, count)

    return steps


def test_turns_go_to_the_model_and_into_the_history() -> None:
    session, _ = make_session(system="Be kind.")
    assert answer(session, "one") == "You said: one"
    answer(session, "two")
    assert [message["content"] for message in fake(session).prompts[-1]] == [
        "Be kind.",
        "one",
        "You said: one",
        "two",
    ]
    assert [turn.role for turn in session.turns] == ["user", "assistant"] * 2
    assert session.last_answer is not None
    assert session.last_answer.usage.completion_tokens == 3


def test_an_interrupted_answer_is_kept_and_marked() -> None:
    session, notices = make_session()
    assert answer(session, "a b c d", first(3)) == "You said: a "
    assert session.turns[-1] == Message("assistant", "You said: a ", interrupted=True)
    assert fake(session).aborted == 1
    assert session.last_answer is not None
    assert session.last_answer.usage.decode_rate == pytest.approx(10.0)
    answer(session, "go on")
    assert fake(session).prompts[-1][1] == {"role": "assistant", "content": "You said: a "}
    assert notices == []


def drafting(*texts: tuple[str, bool]) -> Any:
    """A stream with these texts in place of the fake's, each of which may be a draft."""

    def stream(*_: object, **__: object) -> Iterator[RequestOutput]:
        for place, (text, is_draft) in enumerate(texts, 1):
            reason = "stop" if place == len(texts) else None
            metrics = RequestMetrics(0.0, 0.25, 0.5, 0.5, None, 1)
            tokens = () if is_draft else (place,)
            sample = CompletionOutput(0, text, tokens, None, reason, None, metrics)
            yield RequestOutput("fake", None, (1,), (sample,), finished=False, draft=is_draft)

    return stream


DRAFTED = [
    ("<think> _ _", True),
    ("<think>so be</th", False),
    ("ink> _", True),
    ("ink>", False),
    (" _ <b> _", True),
    ("Yes <b", False),
    ("> _", True),
    (">!", False),
]


def test_drafts_are_parsed_as_the_answer_would_be_and_change_nothing() -> None:
    """Tags may be cut by canvases, and are no part of a draft."""
    session, _ = make_session()
    fake(session).stream = drafting(*DRAFTED)  # type: ignore[method-assign]
    pieces = list(session.ask("hi"))
    drafts = [piece for piece in pieces if isinstance(piece, Draft)]
    assert drafts == [Draft("_ _", ""), Draft("", "_"), Draft("", "_ <b> _"), Draft("", "> _")]
    final = [piece for piece in pieces if not isinstance(piece, Draft)]
    fake(session).stream = drafting(*[one for one in DRAFTED if not one[1]])  # type: ignore[method-assign]
    assert final == list(session.ask("hi"))
    assert session.turns[1] == session.turns[3] == Message("assistant", "Yes <b>!")
    assert session.last_answer is not None
    assert session.last_answer.reasoning == "so be"
    assert session.last_answer.usage.completion_tokens == 4


def test_an_answer_stopped_in_its_first_draft_is_taken_back() -> None:
    session, notices = make_session()
    fake(session).stream = drafting(*DRAFTED)  # type: ignore[method-assign]
    assert list(session.ask("hi", first(1))) == [Draft("_ _", "")]
    assert session.turns == [] and session.last_answer is None
    assert notices == ["stopped before the answer began; the message was taken back"]


@pytest.mark.parametrize(("question", "steps"), [("hello", 0), ("<think>hm hm hm</think> yes", 2)])
def test_a_message_stopped_before_its_answer_is_taken_back(question: str, steps: int) -> None:
    session, notices = make_session()
    assert answer(session, question, first(steps)) == ""
    assert session.turns == []
    assert fake(session).aborted == (steps > 0)
    assert notices == ["stopped before the answer began; the message was taken back"]


def test_reasoning_is_told_apart_and_not_fed_back() -> None:
    session, _ = make_session()
    pieces = list(session.ask("<think>let me see</think> yes"))
    assert "".join(text for part, text in pieces if part == "thinking") == "let me see"
    assert session.turns[-1].content == "yes"
    assert session.last_answer is not None
    assert session.last_answer.reasoning == "let me see"


def test_a_failure_leaves_the_history_as_it_was() -> None:
    session, _ = make_session()
    answer(session, "one")
    with pytest.raises(RuntimeFailure):
        answer(session, "fail")
    assert len(session.turns) == 2
    assert answer(session, "two") == "You said: two"


def test_a_full_context_drops_the_oldest_pairs_and_says_so() -> None:
    session, notices = make_session(max_model_len=60, system="Rule.")
    for number in range(6):
        answer(session, f"question {number} with some words")
    sent = [message["content"] for message in fake(session).prompts[-1]]
    assert sent[0] == "Rule."
    assert sent[1].startswith("question 3")
    assert sent[-1].startswith("question 5")
    assert set(notices) == {"the context of 60 tokens is full: the oldest turn was dropped"}


def test_several_turns_make_room_for_a_long_message() -> None:
    session, notices = make_session(max_model_len=60)
    for number in range(3):
        answer(session, f"q {number}")
    answer(session, "word " * 40)
    assert len(session.turns) == 2
    assert notices[0] == "the context of 60 tokens is full: the oldest 3 turns were dropped"


def test_a_message_that_can_never_fit() -> None:
    session, _ = make_session(max_model_len=20)
    answer(session, "hello")
    with pytest.raises(
        UsageError, match="the message makes 32 tokens, the context holds 20: shorten it"
    ):
        answer(session, "word " * 30)
    assert len(session.turns) == 2


def test_an_answer_that_fills_the_context() -> None:
    session, notices = make_session(max_model_len=10)
    answer(session, "a b c d e f")
    assert notices == ["the answer was cut where the context ends"]
    assert session.turns[-1].content == "You said: "


def test_regenerate_replaces_the_last_answer() -> None:
    session, _ = make_session()
    with pytest.raises(UsageError, match="no answer yet"):
        list(session.regenerate())
    answer(session, "one")
    answer(session, "two", first(1))
    assert "".join(text for _, text in session.regenerate()) == "You said: two"
    assert [turn.content for turn in session.turns] == [
        "one",
        "You said: one",
        "two",
        "You said: two",
    ]


def test_regenerate_keeps_the_old_answer_when_there_is_no_new_one() -> None:
    session, _ = make_session()
    answer(session, "one")
    before = list(session.turns)
    assert list(session.regenerate(first(0))) == []
    assert session.turns == before
    fake(session).built.max_model_len = 3
    with pytest.raises(NanoserveError):
        list(session.regenerate())
    assert session.turns == before


def test_undo_and_reset() -> None:
    session, _ = make_session(system="Rule.")
    answer(session, "one")
    answer(session, "two")
    assert session.undo() == "two"
    assert len(session.turns) == 2
    session.reset()
    assert session.messages() == [Message("system", "Rule.")]
    with pytest.raises(UsageError):
        session.undo()


def test_settings_lie_over_the_defaults_and_are_checked() -> None:
    session, _ = make_session(settings={"top_k": 5})
    session.change("temperature", 0)
    answer(session, "hello")
    params = fake(session).params[-1]
    assert (params.temperature, params.top_k, params.top_p) == (0, 5, 0.95)
    for name, value in [
        ("temperature", -1),
        ("top_p", "x"),
        ("n", 2),
        ("colour", 1),
        ("stop", [""]),
    ]:
        with pytest.raises(UsageError):
            session.change(name, value)
    assert session.settings == {"temperature": 0, "top_k": 5}
    session.change("top_k", None)
    assert session.settings == {"temperature": 0}


def test_save_and_load(tmp_path: Path) -> None:
    session, _ = make_session(system="Rule.", settings={"seed": 3})
    answer(session, "é")
    answer(session, "two", first(1))
    path = tmp_path / "chat.json"
    session.save(path)
    saved = json.loads(path.read_text("utf-8"))
    assert saved["settings"] == {"seed": 3}
    assert saved["system"] == "Rule."
    assert saved["messages"][-1] == {"role": "assistant", "content": "You ", "interrupted": True}
    other, _ = make_session(system="Other.")
    other.load(path)
    assert (other.messages(), other.settings) == (session.messages(), session.settings)
    assert os.listdir(tmp_path) == ["chat.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_save_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = make_session()
    path = tmp_path / "chat.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeFailure, match=r"cannot write .*: No space left on device"):
        session.save(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["chat.json"]
    with pytest.raises(RuntimeFailure, match="No such file"):
        session.save(tmp_path / "nowhere" / "chat.json")


def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    session, _ = make_session()
    with pytest.raises(RuntimeFailure, match=r"cannot write .*: File name too long"):
        session.save(tmp_path / ("x" * 300))


def test_only_regular_files_are_saved_to_and_loaded(tmp_path: Path) -> None:
    session, _ = make_session()
    pipe, link, path = tmp_path / "pipe", tmp_path / "link", tmp_path / "chat.json"
    os.mkfifo(pipe)
    with pytest.raises(RuntimeFailure, match="pipe: it is no regular file"):
        session.save(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(UsageError, match="pipe is not a regular file"):
        session.load(pipe)
    link.symlink_to(path)
    session.save(link)
    assert link.is_symlink() and path.is_file()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"messages": 3}',
        b'{"messages": [{"role": "tool", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}]}',
        b'{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}',
        b'{"messages": [], "settings": {"temperature": -3}}',
        b'{"messages": [], "settings": {"n": 3}}',
        b'{"messages": [], "settings": {"temperature": NaN}}',
        b'{"messages": [], "other": 1}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages":' + b"[" * 100_000,
    ],
)
def test_what_is_no_saved_chat_changes_nothing(tmp_path: Path, content: bytes) -> None:
    session, _ = make_session(system="Rule.")
    answer(session, "one")
    before = session.messages()
    (tmp_path / "chat.json").write_bytes(content)
    with pytest.raises(UsageError):
        session.load(tmp_path / "chat.json")
    with pytest.raises(UsageError, match="cannot read"):
        session.load(tmp_path / "other.json")
    assert session.messages() == before


def contents(session: ChatSession) -> list[str]:
    return [turn.content for turn in session.turns]


def test_a_conversation_is_logged_turn_by_turn_and_continued(tmp_path: Path) -> None:
    session, _ = make_session(system="Rule.", settings={"seed": 3}, logs=tmp_path / "logs")
    with pytest.raises(UsageError, match="no conversation to continue"):
        find(tmp_path / "logs", None)
    for question in ("one", "two"):
        answer(session, question)
        other, _ = make_session()
        other.load(find(tmp_path / "logs", None))
        assert (other.messages(), other.settings) == (session.messages(), session.settings)
    (log,) = (tmp_path / "logs").iterdir()
    assert len(log.read_text().splitlines()) == 2
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    log.write_bytes(log.read_bytes()[:-9])  # the disk was full
    other, _ = make_session(logs=tmp_path / "logs")
    other.load(log)
    assert contents(other) == ["one", "You said: one"]
    answer(other, "three")  # goes into a new file, with what was before
    assert find(tmp_path / "logs", None) != log
    session.load(find(tmp_path / "logs", None))
    assert contents(session)[::2] == ["one", "three"]


def test_what_is_taken_back_or_dropped(tmp_path: Path) -> None:
    """The log has what the conversation has, and the turns for which the context has no room."""
    session, _ = make_session(max_model_len=40, logs=tmp_path)
    questions = [f"question {number} with some words" for number in range(4)]
    for question in questions:
        answer(session, question)
    session.undo()
    kept, _ = make_session()
    kept.load(find(tmp_path, None))
    assert len(session.turns) < len(kept.turns)
    assert contents(kept)[::2] == questions[:3]
    list(session.regenerate(first(1)))
    list(session.regenerate(first(0)))  # without a new answer
    kept.load(find(tmp_path, None))
    assert contents(kept)[-2:] == [questions[2], "You "]
    session.reset()
    answer(session, "new")
    kept.load(find(tmp_path, None))
    assert contents(kept) == ["new", "You said: new"]
    assert len(list(tmp_path.iterdir())) == 2


def test_only_so_many_logs_are_kept(tmp_path: Path) -> None:
    for number in range(1020):
        (tmp_path / f"2000-{number:04}.jsonl").touch()
    session, _ = make_session(logs=tmp_path)
    answer(session, "one")
    assert len(names := sorted(os.listdir(tmp_path))) == 1000
    assert names[0] == "2000-0021.jsonl" and tmp_path / names[-1] == find(tmp_path, None)


def test_a_log_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    session, notices = make_session(logs=tmp_path / "file")
    answer(session, "one")
    answer(session, "two")
    assert len(session.turns) == 4
    assert notices == [
        f"the conversation is not logged: cannot write to {tmp_path / 'file'}: File exists"
    ]


def test_the_template_is_told_whether_the_model_reasons() -> None:
    session, _ = make_session()
    for thinking, told in (
        (None, {}),
        (False, {"enable_thinking": False}),
        (True, {"enable_thinking": True}),
    ):
        session.model.thinking = thinking
        answer(session, "hello")
        assert fake(session).template_arguments[-1] == told


def test_an_answer_that_is_only_reasoning_is_taken_back() -> None:
    session, notices = make_session(settings={"max_tokens": 2})
    assert answer(session, "<think>hm hm hm</think> yes") == ""
    assert session.turns == []
    assert notices == [
        "the answer was cut off while the model reasoned; the message was taken back"
    ]


def test_control_tokens_of_an_answer_tell_its_reasoning_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gpt-oss: the channels are no part of the text, and no history holds them or the reasoning."""
    session, _ = make_session()
    markers = {1: "<|channel|>", 2: "<|message|>", 3: "<|end|>", 4: "<|start|>"}
    updates = [
        ("analysis", ((0, 1), (8, 2))),
        ("Hm.", ()),
        ("", ((0, 3), (0, 4))),
        ("assistant", ()),
    ]
    updates += [("final", ((0, 1), (5, 2))), ("Yes", ()), (".", ())]

    def answered(
        text: str, ids: tuple[int, ...], params: SamplingParams
    ) -> Iterator[RequestOutput]:
        for step, (new, marks) in enumerate(updates, 1):
            reason = "stop" if step == len(updates) else None
            metrics = RequestMetrics(0.0, 0.25, 0.5, 0.5, None, step)
            sample = CompletionOutput(0, new, (step,), None, reason, None, metrics, marks=marks)
            yield RequestOutput("fake", None, ids, (sample,), reason is not None)

    monkeypatch.setattr(fake(session), "_stream", answered)
    monkeypatch.setattr(
        fake(session).tokenizer,
        "answer_parser",
        lambda _: AnswerParser(HarmonyAnswers(), markers),
        raising=False,
    )
    assert list(session.ask("hi")) == [("thinking", "Hm."), ("answer", "Yes"), ("answer", ".")]
    assert session.turns[-1] == Message("assistant", "Yes.")
    assert session.last_answer is not None and session.last_answer.reasoning == "Hm."
