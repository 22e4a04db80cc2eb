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

# The numbers of GGUF for types of tensors, and of metadata.
F32, Q4_0, IQ2_XXS, IQ3_S, IQ4_XS = 0, 2, 16, 21, 23
UINT16, UINT32, STRING, ARRAY, UINT64 = 2, 4, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    dimensions = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return (
        text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)
    )


def file(
    entries: list[bytes], tensors: list[bytes], data: int = 256, version: int = 3, **counts: int
) -> bytes:
    numbers = counts.get("num_tensors", len(tensors)), counts.get("num_entries", len(entries))
    header = (
        b"GGUF" + struct.pack("<IQQ", version, *numbers) + b"".join(entries) + b"".join(tensors)
    )
    return header + bytes(-len(header) % 32) + bytes(data)


WEIGHT = tensor("weight", (4, 16))


def with_tensor(shape: tuple[int, ...] = (4, 16), kind: int = F32, offset: int = 0) -> bytes:
    """A file of one tensor like this."""
    return file([], [tensor("weight", shape, kind, offset)])


def with_entry(kind: int, value: bytes, key: str = "key") -> bytes:
    """A file with such metadata and one tensor."""
    return file([entry(key, kind, value)], [WEIGHT])


def array_of(kind: int, length: int, *values: bytes) -> bytes:
    return struct.pack("<IQ", kind, length) + b"".join(values)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12\n"
ENDS_EARLY = "the file ends in its header"
OTHER_SHARD = (
    "one of several files of a model; give the first, whose name ends in -00001-of-00003.gguf"
)
ALIGNMENT = "general.alignment must be a multiple of 8"

# What is wrong with a file, its bytes, and what the line says.
BAD = {
    "an empty file": (b"", "cannot be read as GGUF"),
    "another format": (b"GGML" + bytes(60), "not a GGUF file"),
    "a Git-LFS pointer": (LFS_POINTER, "only a Git-LFS pointer to the file"),
    "only the magic number": (b"GGUF", ENDS_EARLY),
    "version 1": (
        file([], [WEIGHT], version=1),
        "GGUF version 1 is not read; convert the file to version 3",
    ),
    "version 7": (file([], [WEIGHT], version=7), "GGUF version 7 is not read"),
    "big-endian": (
        file([], [WEIGHT], version=3 << 24),
        "a big-endian file; convert it with `gguf-convert-endian FILE little`",
    ),
    "a million keys": (
        file([], [WEIGHT], num_entries=1_000_000),
        "1000000 metadata keys; at most 65536",
    ),
    "2^63 tensors": (
        file([], [WEIGHT], num_tensors=1 << 63),
        "tensors and 0 metadata keys; at most 65536",
    ),
    "a byte too few": (
        file([], [WEIGHT], data=255),
        "tensor 'weight' ends beyond the file, which is truncated",
    ),
    "a tensor at the end": (with_tensor(offset=32), "ends beyond the file, which is truncated"),
    "a tensor far away": (with_tensor(offset=1 << 62), "ends beyond the file"),
    "a tensor off the grid": (with_tensor(offset=7), "does not begin at a multiple of 32 bytes"),
    "a tensor twice": (file([], [WEIGHT, WEIGHT]), "tensor 'weight' occurs twice"),
    "tensors that overlap": (
        file([], [WEIGHT, tensor("other", (4, 16), offset=32)], 512),
        "tensors 'weight' and 'other' overlap",
    ),
    "a huge tensor": (with_tensor((1 << 62, 1 << 62)), "does not fit into the file"),
    "an empty tensor": (with_tensor((0, 16)), "does not fit into the file"),
    "five dimensions": (with_tensor((1, 1, 1, 1, 1)), "has 5 dimensions; 1 to 4 are read"),
    "IQ2_XXS": (
        with_tensor(kind=IQ2_XXS),
        "has type IQ2_XXS, which is not read; use a file of F32, F16, Q4_0",
    ),
    "IQ3_S": (with_tensor(kind=IQ3_S), "has type IQ3_S, which is not read"),
    "IQ4_XS": (with_tensor(kind=IQ4_XS), "has type IQ4_XS, which is not read"),
    "an unknown type": (with_tensor(kind=99), "has type number 99"),
    "half a block": (with_tensor(kind=Q4_0), "rows of 16 are not whole blocks of 32"),
    "one file of three": (with_entry(UINT16, struct.pack("<H", 3), key="split.count"), OTHER_SHARD),
    "a key twice": (
        file([entry("key", UINT32, bytes(4))] * 2, [WEIGHT]),
        "metadata key 'key' occurs twice",
    ),
    "unknown metadata": (with_entry(99, bytes(4)), "metadata of the unknown type 99"),
    "an array of arrays": (with_entry(ARRAY, array_of(ARRAY, 1)), "a metadata array of the type 9"),
    "2^60 strings": (with_entry(ARRAY, array_of(STRING, 1 << 60)), ENDS_EARLY),
    "2^61 numbers": (with_entry(ARRAY, array_of(UINT64, 1 << 61)), ENDS_EARLY),
    "a huge second string": (
        file([entry("key", ARRAY, array_of(STRING, 2, text("a"), struct.pack("<Q", 1 << 63)))], []),
        ENDS_EARLY,
    ),
    "one string of 20": (
        file([entry("key", ARRAY, array_of(STRING, 20, text("a")))], [], data=0),
        ENDS_EARLY,
    ),
    "a string that is too long": (
        with_entry(ARRAY, array_of(STRING, 1, struct.pack("<Q", 3000))),
        ENDS_EARLY,
    ),
    "bytes that are no text": (with_entry(STRING, struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
    "an alignment of 0": (
        with_entry(UINT32, struct.pack("<I", 0), key="general.alignment"),
        ALIGNMENT,
    ),
    "an alignment of text": (with_entry(STRING, text("x"), key="general.alignment"), ALIGNMENT),
    "a long name": (
        file([text("k" * 70_000)], [WEIGHT], num_entries=1),
        "a name of 70000 bytes; at most 65536 are read",
    ),
}


@pytest.mark.parametrize(("content", "problem"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_one_line(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        GgufFile(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(with_entry(UINT32, struct.pack("<I", 7)))
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
    assert (
        GgufFile(sound).tensors.keys()
        == wanted.keys()
        > GgufFile(sound, is_first=False).tensors.keys()
    )
    load_model(gguf_directory(sound), "float32")
    with pytest.raises(
        ModelError,
        match=r"model-00002-of-00002.gguf: one of several .* -00001-of-00002.gguf; llama-gg",
    ):
        gguf_directory(last)
    alone = shutil.copy(sound, tmp_path)
    with pytest.raises(
        ModelError, match=r"model-00002-of-00002.gguf: cannot be read as GGUF \(.*No such file"
    ):
        gguf_directory(Path(alone))
    shutil.copy(sound, tmp_path / last.name)
    with pytest.raises(
        ModelError, match=r"model-00002-of-00002.gguf: tensor '.*' is also in an earlier file"
    ):
        gguf_directory(Path(alone))


def test_joined_files_say_that_they_are_of_none(tmp_path: Path) -> None:
    """``llama-gguf-split --merge`` leaves a count of 0."""
    joined = with_entry(UINT16, struct.pack("<H", 0), key="split.count")
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


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_metadata_are_an_error_or_a_model(data: st.DataObject, sound: Path) -> None:
    found = GgufFile(sound)
    more = [
        "llama.rope.scaling.type",
        "llama.rope.scaling.factor",
        "llama.expert_count",
        "tokenizer.ggml.pre",
    ]
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
    for words, more, expected in (
        ("llama-bpe", {}, [1, 4]),
        ("lfm2", {}, [1, 4]),
        ("qwen2", {}, [4]),
        ("qwen2", both, [1, 4, 2]),
    ):
        found = GgufFile(sound)
        found.metadata |= more
        found.metadata |= {
            f"tokenizer.ggml.{key}": value for key, value in (("model", "gpt2"), ("merges", []))
        }
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
    assert (
        line
        == f"{sound}: tensor token_embd.weight has scales that are NaN or infinite; the file is "
        "damaged"
    )
    line = refusal(sound, monkeypatch, blk__weight=factors)
    assert line == f"{sound}: tensor blk.weight does not belong to a llama model of this config"
    line = refusal(sound, monkeypatch, rope_freqs__weight=embedding)
    assert line == f"{sound}: tensor rope_freqs.weight is Q8_0, not F32"
    line = refusal(sound, monkeypatch, rope_freqs__weight=replace(factors, shape=(4,)))
    assert line.startswith(f"{sound}: frequency_factors must be a list of 8 numbers")
    line = refusal(
        sound, monkeypatch, rope_freqs__weight=replace(factors, offset=factors.offset + 2)
    )
    assert line.startswith(f"{sound}: frequency_factors must be ")


SOUND = file(
    [
        entry("key", UINT32, struct.pack("<I", 7)),
        entry("list", ARRAY, array_of(STRING, 2, text("a"), text("b"))),
    ],
    [WEIGHT, tensor("other", (8,), offset=256)],
    512,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(st.integers(0, len(SOUND) - 1), st.integers(0, 255), max_size=4),
    end=st.integers(0, 9),
)
def test_changed_bytes_are_an_error_or_a_sound_file(
    changes: dict[int, int], end: int, tmp_path: Path
) -> None:
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
        assert all(
            tensor.offset + tensor.num_bytes <= len(content) for tensor in found.tensors.values()
        )
