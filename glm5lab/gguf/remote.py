"""Headers of remote GGUF files: only the first bytes of each shard travel, the weights stay there.

with remote_sources("hf://owner/repo/GLM-5-Q4_K_M-00001-of-00012.gguf") as sources: ...
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from glm5lab.errors import InputError
from glm5lab.gguf.http import Client, joined, patiently
from glm5lab.gguf.http_errors import StatusError
from glm5lab.gguf.http_source import HttpSource
from glm5lab.gguf.shards import missing_shards, one_model, sister_names
from glm5lab.gguf.source import FIRST_READ, LATER_READ
from glm5lab.gguf.url import HubPath, RemoteFile, is_plain, parse_url

MAX_LISTING_BYTES, MAX_LISTING_PAGES = 1 << 24, 50
# A name may claim thousands of shards: after so many that are not there, no more are asked for.
MOST_MISSING = 16


@contextmanager
def remote_sources(url: str | Path) -> Iterator[Iterator[HttpSource]]:
    """The shards of a remote model, in order; the iteration opens each when it gets there.

    Args:
        url: any shard, a single file, or an hf:// folder that holds one model.

    Raises:
        InputError: not there, several models, missing shards, or whatever HttpSource refuses;
            the iteration raises it, too.
    """
    with ExitStack() as stack:
        client = stack.enter_context(Client())
        place = parse_url(url)
        if isinstance(place, HubPath):
            _refuse_offline(place)
            place = place if place.path.lower().endswith(".gguf") else _in_folder(place, client)
            file = place.file()
        else:
            file = place
        files = [file.sister(n) for n in sister_names(file.file_name, file.name)] or [file]
        bar = stack.enter_context(_progress(len(files)))
        yield _open_each(files, client, bar)


def _open_each(files: list[RemoteFile], client: Client, bar: Any) -> Iterator[HttpSource]:
    """Each shard; at the end, those that the server does not have are named together."""
    missing: list[str] = []
    for number, file in enumerate(files):
        bar.set_description(f"header {number + 1} of {len(files)}")
        try:
            first_read = LATER_READ if number else FIRST_READ
            source = HttpSource(file, client, bar.update, first_read)
        except StatusError as error:
            if len(files) == 1 or error.status != 404:
                raise
            missing.append(file.file_name)
            if len(missing) == MOST_MISSING:
                break
            continue
        yield source
    if not missing:
        return
    if len(missing) == number + 1:
        which = f"all {len(files)} shards"
        if len(missing) < len(files):
            which = f"the first {len(missing)} of {len(files)} shards"
        raise InputError(files[0].name, f"the server answers 404 for {which}", "check the address")
    more = f", of the first {number + 1}" if number + 1 < len(files) else ""
    raise missing_shards(files[0].name, missing, len(files), "name a complete set", f" (404{more})")


def _refuse_offline(place: HubPath) -> None:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise InputError(str(place), "HF_HUB_OFFLINE is set", "unset it, or name a local file")


def _in_folder(place: HubPath, client: Client) -> HubPath:
    """The one model in a folder of a repository, or below it."""
    paths = [p for p in _listing(place, client) if p.lower().endswith(".gguf")]
    if not paths:
        raise InputError(str(place), "the folder holds no .gguf file", "name a .gguf file")
    first = place.at(one_model(paths, str(place), lambda path: str(place.at(path))))
    folder, _, name = first.path.rpartition("/")
    sisters = sister_names(name, str(first))
    there = set(paths)
    missing = [n for n in sisters if (f"{folder}/{n}" if folder else n) not in there]
    if missing:
        raise missing_shards(str(first), missing, len(sisters), "name a complete set")
    return first


def _listing(place: HubPath, client: Client) -> list[str]:
    """Paths of all files in and below a folder."""
    listing, page = place.listing(), ""
    paths: list[str] = []
    for _ in range(MAX_LISTING_PAGES):
        body, page = patiently(listing, partial(_body, listing, client, page))
        try:
            entries = json.loads(body)
            if not isinstance(entries, list):
                raise TypeError("not a list")
            paths += [e["path"] for e in entries if e["type"] == "file"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            cause = "the server's list of files is not what the Hub's is (HF_ENDPOINT?)"
            raise InputError(str(place), cause, "name a .gguf file") from error
        if not page:
            break
    return [p for p in paths if isinstance(p, str) and is_plain(p)]


def _body(listing: RemoteFile, client: Client, page: str) -> tuple[bytes, str]:
    """One page of a list, and the address of the next one."""
    body = bytearray()
    answer = client.get(listing, {}, page)
    try:
        while piece := answer.read(1 << 16):
            body += piece
            if len(body) > MAX_LISTING_BYTES:
                raise InputError(listing.name, "its list of files is endless", "name a .gguf file")
    finally:
        answer.close()
    page = answer.next_page
    return bytes(body), joined(listing, answer.url, page) if page else ""


def _progress(files: int) -> Any:
    """A bar of bytes on stderr, on terminals only."""
    import sys

    from tqdm import tqdm

    return tqdm(
        desc=f"header 1 of {files}",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        disable=not sys.stderr.isatty(),
        file=sys.stderr,
    )
