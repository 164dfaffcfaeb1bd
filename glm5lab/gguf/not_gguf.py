"""What a file is that should be GGUF and is not."""

DOWNLOAD_AGAIN = "download the file again and compare its size or checksum with the source's"


def what_is_it(head: bytes) -> tuple[str, str]:
    """Cause and fix for a file that does not start with the GGUF magic.

    Args:
        head: its first bytes; 512 are enough.
    """
    text = head.lstrip().lower()
    get = "get the real file (huggingface-cli download, or the download button of the page)"
    if not head:
        return "the file is empty", DOWNLOAD_AGAIN
    if text.startswith(b"version https://git-lfs"):
        return (
            "this is a git-lfs pointer, not the model itself",
            "run `git lfs pull` in that repository, or download the file itself",
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page (HTML), not a GGUF file", get
    if head[:4] in (b"tjgg", b"lmgg", b"fmgg", b"algg"):
        return "this is llama.cpp's old format from before GGUF", "get a GGUF file of the model"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return (
            "this is a safetensors file, not GGUF",
            "vLLM reads the safetensors folder as it is; glm5lab is for GGUF files",
        )
    if head[:2] == b"PK":
        return "this is a ZIP archive (PyTorch checkpoint?), not GGUF", "name a .gguf file"
    if not head.strip(b"\0"):
        return "the file starts with zero bytes (a download that never finished)", DOWNLOAD_AGAIN
    if head[:512].isascii() and b"\0" not in head:
        return "this is a text file, not GGUF (it does not start with 'GGUF')", "name a .gguf file"
    return "not a GGUF file: it does not start with 'GGUF'", "name a .gguf file"
