from pathlib import Path

from scripts import check_templates
from scripts.check_templates import as_sent, compare, digest, main, read_digests
from tests.text.templates import GEMMA, MISTRAL, QWEN


def test_all_cases_of_a_template_are_compared():
    counts = compare(QWEN).counts
    assert counts == {"same": 48}  # twelve conversations, with tools and without, thinking and not


def test_what_both_refuse_is_counted_apart():
    comparison = compare(GEMMA)
    # The template takes no system message, and no two messages of one role in a row, as two results
    # are.
    assert comparison.counts == {"same": 32, "refused": 16}
    assert len(comparison.refusals) == 16


def test_clients_send_arguments_as_text():
    (call,) = as_sent(check_templates.CONVERSATIONS["a call with text"])[1]["tool_calls"]
    assert call["function"] == {"name": "noop", "arguments": "{}"}
    assert as_sent(check_templates.CONVERSATIONS["a call and its result"])[1]["content"] is None


def test_the_table_is_compared_with_what_is_kept(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "mistral.jinja").write_text(MISTRAL)
    kept = tmp_path / "digests.txt"
    monkeypatch.setattr(check_templates, "DIGESTS", kept)
    monkeypatch.setattr("sys.argv", ["check_templates", str(tmp_path), "--keep"])
    assert main() == 0 and "| new |" in capsys.readouterr().out
    assert read_digests().keys() == {digest(MISTRAL)}
    monkeypatch.setattr("sys.argv", ["check_templates", str(tmp_path)])
    assert main() == 0 and "| kept |" in capsys.readouterr().out
    kept.write_text(f"{digest(MISTRAL)} {digest('something else')} mistral\n")
    assert main() == 1 and "1 templates, 1 of them wrong" in capsys.readouterr().out


def test_digests_of_public_templates_are_kept():
    assert len(read_digests()) >= 62
