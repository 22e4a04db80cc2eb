"""Damaged and hostile GGUF files: one clear line, and nothing outside the file is read."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoserve.errors import ModelError
from nanoserve.models.gguf_file import GgufFile

F32, Q4_0, Q2_K = 0, 2, 10


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
    file([], [WEIGHT], version=3 << 24): "GGUF version 50331648",
    file([], [WEIGHT], num_entries=1_000_000): "1000000 metadata keys; at most 65536",
    file([], [WEIGHT], num_tensors=1 << 63): "tensors and 0 metadata keys; at most 65536",
    file(
        [], [WEIGHT], data=255
    ): "tensor 'weight' does not fit|tensor 'weight' ends beyond the file, which is truncated",
    file([], [tensor("weight", (4, 16), offset=32)]): "ends beyond the file, which is truncated",
    file([], [tensor("weight", (4, 16), offset=1 << 62)]): "ends beyond the file",
    file([], [tensor("weight", (4, 16), offset=7)]): "does not begin at a multiple of 32 bytes",
    file([], [WEIGHT, WEIGHT]): "tensor 'weight' stands twice",
    file([], [WEIGHT, tensor("other", (4, 16), offset=32)], 512): "tensors 'weight' and 'other' overlap",
    file([], [tensor("weight", (1 << 62, 1 << 62))]): "does not fit into the file",
    file([], [tensor("weight", (0, 16))]): "does not fit into the file",
    file([], [tensor("weight", (1, 1, 1, 1, 1))]): "has 5 dimensions; 1 to 4 are read",
    file([], [tensor("weight", (4, 16), Q2_K)]): "has type Q2_K, which is not read; use a file of F32, F16, Q4_0",
    file([], [tensor("weight", (4, 16), 99)]): "has type number 99",
    file([], [tensor("weight", (4, 16), Q4_0)]): "rows of 16 are not whole blocks of 32",
    file([entry("key", 4, bytes(4))] * 2, [WEIGHT]): "metadata key 'key' stands twice",
    file([entry("key", 99, bytes(4))], [WEIGHT]): "metadata of the unknown type 99",
    file([entry("key", 9, struct.pack("<IQ", 9, 1))], [WEIGHT]): "a metadata array of the type 9",
    file([entry("key", 9, struct.pack("<IQ", 8, 1 << 60))], [WEIGHT]): "the file ends in its header",
    file([entry("key", 9, struct.pack("<IQ", 10, 1 << 61))], [WEIGHT]): "the file ends in its header",
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
