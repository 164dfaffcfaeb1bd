"""GPT-2's spelling of bytes: every byte is one printable character, so text never splits."""

from functools import cache


@cache
def byte_characters() -> dict[int, str]:
    """The character that stands for each byte; printable Latin-1 stands for itself."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in kept}
    spare = 256
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(spare)
            spare += 1
    return dict(sorted(table.items()))


def encode_bytes(raw: bytes) -> str:
    """Bytes in GPT-2's spelling: b" the" -> "Ġthe"."""
    table = byte_characters()
    return "".join(table[b] for b in raw)
