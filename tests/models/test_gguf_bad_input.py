"""Damaged and hostile GGUF files: one clear line, and nothing outside the file is read."""

import shutil
import struct
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoserve.errors import ModelError
from nanoserve.models.gguf_directory import gguf_directory, model_directory
from nanoserve.models.gguf_file import GgufFile, GgufTensor
from nanoserve.models.loading import load_model
from nanoserve.text.tokenizer import load_tokenizer
from nanoserve.utils.temporary import remove_directory
from tests.oracle.checkpoints import FAMILIES
from tests.oracle.gguf_files import write_gguf

F32, Q4_0, Q2_K, IQ4_XS = 0, 2, 10, 23


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    dimensions = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)


def file(entries: list[bytes], tensors: list[bytes], data: int = 256, version: int = 3, **counts: int) -> bytes:
    numbers = counts.get("num_tensors", len(tensors)), counts.get("num_entries", len(entries))
    header = b"GGUF" + struct.pack("<IQQ", version, *numbers) + b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


WEIGHT = tensor("weight", (4, 16))
BAD = {
    "": "cannot be read as GGUF",
    b"GGML" + bytes(60): "not a GGUF file",
    b"GGUF": "the file ends in its header",
    file([], [WEIGHT], version=1): "GGUF version 1 is not read; convert the file to version 3",
    file([], [WEIGHT], version=3 << 24): "a big-endian file; convert it with `gguf-convert-endian FILE little`",
    file([], [WEIGHT], version=7): "GGUF version 7 is not read",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12\n": "only a Git-LFS pointer to the file",
    file([], [WEIGHT], num_entries=1_000_000): "1000000 metadata keys; at most 65536",
    file([], [WEIGHT], num_tensors=1 << 63): "tensors and 0 metadata keys; at most 65536",
    file(
        [], [WEIGHT], data=255
    ): "tensor 'weight' does not fit|tensor 'weight' ends beyond the file, which is truncated",
    file([], [tensor("weight", (4, 16), offset=32)]): "ends beyond the file, which is truncated",
    file([], [tensor("weight", (4, 16), offset=1 << 62)]): "ends beyond the file",
    file([], [tensor("weight", (4, 16), offset=7)]): "does not begin at a multiple of 32 bytes",
    file([], [WEIGHT, WEIGHT]): "tensor 'weight' occurs twice",
    file([], [WEIGHT, tensor("other", (4, 16), offset=32)], 512): "tensors 'weight' and 'other' overlap",
    file([], [tensor("weight", (1 << 62, 1 << 62))]): "does not fit into the file",
    file([], [tensor("weight", (0, 16))]): "does not fit into the file",
    file([], [tensor("weight", (1, 1, 1, 1, 1))]): "has 5 dimensions; 1 to 4 are read",
    file([], [tensor("weight", (4, 16), Q2_K)]): "has type Q2_K, which is not read; use a file of F32, F16, Q4_0",
    file([], [tensor("weight", (4, 16), 11)]): "has type Q3_K, which is not read",
    file([], [tensor("weight", (4, 16), IQ4_XS)]): "has type IQ4_XS, which is not read",
    file([], [tensor("weight", (4, 16), 99)]): "has type number 99",
    file([entry("split.count", 2, struct.pack("<H", 3))], [WEIGHT]): "one of several files of a model; give the first,"
    " whose name ends in -00001-of-00003.gguf",
    file([], [tensor("weight", (4, 16), Q4_0)]): "rows of 16 are not whole blocks of 32",
    file([entry("key", 4, bytes(4))] * 2, [WEIGHT]): "metadata key 'key' occurs twice",
    file([entry("key", 99, bytes(4))], [WEIGHT]): "metadata of the unknown type 99",
    file([entry("key", 9, struct.pack("<IQ", 9, 1))], [WEIGHT]): "a metadata array of the type 9",
    file([entry("key", 9, struct.pack("<IQ", 8, 1 << 60))], [WEIGHT]): "the file ends in its header",
    file([entry("key", 9, struct.pack("<IQ", 10, 1 << 61))], [WEIGHT]): "the file ends in its header",
    file(
        [entry("key", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 1 << 63))], []
    ): "ends in its header",
    file([entry("key", 9, struct.pack("<IQ", 8, 20) + text("a"))], [], data=0): "the file ends in its header",
    file(
        [entry("key", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 3000))], [WEIGHT]
    ): "the file ends in its header",
    file([entry("key", 8, struct.pack("<Q", 2) + b"\xff\xfe")], [WEIGHT]): "not UTF-8",
    file([entry("general.alignment", 4, struct.pack("<I", 0))], [WEIGHT]): "general.alignment must be a multiple of 8",
    file([entry("general.alignment", 8, text("x"))], [WEIGHT]): "general.alignment must be a multiple of 8",
    file([text("k" * 70_000)], [WEIGHT], num_entries=1): "a name of 70000 bytes; at most 65536 are read",
}


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_is_wrong_is_one_line(number: int, tmp_path: Path) -> None:
    content, problem = list(BAD.items())[number]
    path = tmp_path / "model.gguf"
    path.write_bytes(content or b"")
    with pytest.raises(ModelError, match=problem) as caught:
        GgufFile(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(file([entry("key", 4, struct.pack("<I", 7))], [WEIGHT]))
    found = GgufFile(tmp_path / "model.gguf")
    assert found.metadata == {"key": 7}
    assert found.tensors["weight"].shape == (4, 16)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a small model in two files, of which it is the first."""
    path: Path = tmp_path_factory.mktemp("sound") / "model.gguf"
    torch.manual_seed(3)
    config = FAMILIES["llama-llama3"]()
    config.num_hidden_layers, config.vocab_size = 1, 280
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    write_gguf(model, path, "Q8_0", split=8)
    return path.with_name("model-00001-of-00002.gguf")


def test_a_model_in_several_files(sound: Path, tmp_path: Path) -> None:
    last = sound.with_name("model-00002-of-00002.gguf")
    wanted = {**GgufFile(sound, is_first=False).tensors, **GgufFile(last, is_first=False).tensors}
    assert GgufFile(sound).tensors.keys() == wanted.keys() > GgufFile(sound, is_first=False).tensors.keys()
    load_model(gguf_directory(sound), "float32")
    with pytest.raises(
        ModelError, match=r"model-00002-of-00002.gguf: one of several .* -00001-of-00002.gguf; llama-gg"
    ):
        gguf_directory(last)
    alone = shutil.copy(sound, tmp_path)
    with pytest.raises(ModelError, match=r"model-00002-of-00002.gguf: cannot be read as GGUF \(.*No such file"):
        gguf_directory(Path(alone))
    shutil.copy(sound, tmp_path / last.name)
    with pytest.raises(ModelError, match=r"model-00002-of-00002.gguf: tensor '.*' is also in an earlier file"):
        gguf_directory(Path(alone))


def test_joined_files_say_that_they_are_of_none(tmp_path: Path) -> None:
    """``llama-gguf-split --merge`` leaves a count of 0."""
    joined = file([entry("split.count", 2, struct.pack("<H", 0))], [WEIGHT])
    (tmp_path / "model.gguf").write_bytes(joined)
    assert GgufFile(tmp_path / "model.gguf").tensors.keys() == {"weight"}


METADATA = st.one_of(
    st.booleans(),
    st.integers(-3, 1 << 64),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 9), max_size=3).map(lambda numbers: memoryview(array("q", numbers))),
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.floats(), max_size=3).map(lambda numbers: memoryview(array("d", numbers))),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_metadata_are_an_error_or_a_model(data: st.DataObject, sound: Path) -> None:
    found = GgufFile(sound)
    more = ["llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count", "tokenizer.ggml.pre"]
    keys = st.sampled_from([*found.metadata, *more, "general.basename"])
    changes = data.draw(st.dictionaries(keys, METADATA, min_size=1, max_size=2))
    if data.draw(st.booleans()):  # the other kind of tokenizer
        changes |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": data.draw(METADATA)}
    found.metadata |= changes
    try:
        directory = model_directory.__wrapped__(found)
        load_tokenizer(directory).close()
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        remove_directory(directory)


def test_a_vocabulary_without_a_word_about_bos_has_it_where_llama_cpp_adds_it(sound: Path) -> None:
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    for words, more, expected in (("llama-bpe", {}, [1, 4]), ("qwen2", {}, [4]), ("qwen2", both, [1, 4, 2])):
        found = GgufFile(sound)
        found.metadata |= more
        found.metadata |= {f"tokenizer.ggml.{key}": value for key, value in (("model", "gpt2"), ("merges", []))}
        found.metadata["tokenizer.ggml.pre"] = words
        tokenizer = load_tokenizer(model_directory.__wrapped__(found))
        assert tokenizer.encode("a") == expected
        tokenizer.close()


def refusal(sound: Path, monkeypatch: pytest.MonkeyPatch, **changed: GgufTensor) -> str:
    found = GgufFile(sound)
    found.tensors |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    monkeypatch.setattr("nanoserve.models.gguf_checkpoint.open_gguf", lambda path: found)
    with pytest.raises(ModelError) as caught:
        load_model(model_directory.__wrapped__(found), "float32")
    return str(caught.value)


def test_tensors_of_an_unexpected_form(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = GgufFile(sound).tensors
    embedding, factors = tensors["token_embd.weight"], tensors["rope_freqs.weight"]
    line = refusal(sound, monkeypatch, output_norm__weight=replace(embedding, shape=(64,)))
    assert line == f"{sound}: tensor output_norm.weight is stored as Q8_0; only matrices may be"
    damaged = bytearray(embedding.data)
    damaged[embedding.offset : embedding.offset + 2] = b"\x00\x7e"  # NaN as float16
    line = refusal(sound, monkeypatch, token_embd__weight=replace(embedding, data=damaged))
    assert line == f"{sound}: tensor token_embd.weight has scales that are NaN or infinite; the file is damaged"
    line = refusal(sound, monkeypatch, blk__weight=factors)
    assert line == f"{sound}: tensor blk.weight does not belong to a llama model of this config"
    line = refusal(sound, monkeypatch, rope_freqs__weight=embedding)
    assert line == f"{sound}: tensor rope_freqs.weight is Q8_0, not F32"
    line = refusal(sound, monkeypatch, rope_freqs__weight=replace(factors, shape=(4,)))
    assert line.startswith(f"{sound}: frequency_factors must be a list of 8 numbers")
    line = refusal(sound, monkeypatch, rope_freqs__weight=replace(factors, offset=factors.offset + 2))
    assert line.startswith(f"{sound}: frequency_factors must be ")


SOUND = file(
    [entry("key", 4, struct.pack("<I", 7)), entry("list", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))],
    [WEIGHT, tensor("other", (8,), offset=256)],
    512,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.integers(0, len(SOUND) - 1), st.integers(0, 255), max_size=4), end=st.integers(0, 9))
def test_changed_bytes_are_an_error_or_a_sound_file(changes: dict[int, int], end: int, tmp_path: Path) -> None:
    content = bytearray(SOUND[: len(SOUND) * (end + 1) // 10])
    for place, value in changes.items():
        if place < len(content):
            content[place] = value
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    try:
        found = GgufFile(path)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert all(tensor.offset + tensor.num_bytes <= len(content) for tensor in found.tensors.values())
