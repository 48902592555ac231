"""Turn a folder or a Hub id into local files, and files into a commit on the Hub.

The only file that imports huggingface_hub.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Literal

from moelora.slicing.errors import InputError, OutputError, UsageError

CONFIG_NAME = "adapter_config.json"
# The first of these that a repository has is the adapter's weights; the others stay there.
WEIGHTS_NAMES = (
    "adapter_model.safetensors",
    "adapter_model.safetensors.index.json",
    "adapter_model.bin",
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_repo_name(name: str) -> None:
    """Raise `UsageError` unless ``name`` can be a repository's on the Hub: owner/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"{name!r} is no name of a repository: {error}") from error
    if name.count("/") != 1:
        raise UsageError(f"{name!r} is no name of a repository: expected owner/name")


def fetch_adapter(name_or_path: str, revision: str | None = None) -> Path:
    """Return the local folder of an adapter; of a Hub id only the needed files are downloaded.

    All files are of one commit, also when the branch moves meanwhile: ``pinned_revision``.

    Raises:
        InputError: neither a folder nor a Hub id that can be reached.
    """
    path = local_adapter(name_or_path)
    if path is not None:
        return path
    from huggingface_hub import hf_hub_download

    try:
        config = Path(hf_hub_download(name_or_path, CONFIG_NAME, revision=revision))
        commit = pinned_revision(config.parent) or revision
        _fetch_weights(name_or_path, commit)
    except InputError:
        raise
    except Exception as error:
        raise _unreachable(name_or_path, "adapter", error) from error
    return config.parent


def _fetch_weights(name: str, commit: str | None) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for number, file in enumerate(WEIGHTS_NAMES):
        try:
            path = Path(hf_hub_download(name, file, revision=commit))
        except EntryNotFoundError:
            # Offline, "not in the cache" says the same: then the next name may be.
            if number == len(WEIGHTS_NAMES) - 1:
                raise
            continue
        if file.endswith(".index.json"):
            from moelora.slicing.weights import index_files  # which imports this file

            for one in index_files(path):
                hf_hub_download(name, one, revision=commit)
        return


def pinned_revision(folder: Path) -> str | None:
    """Return the commit that a folder of the Hub's cache holds, None for any other folder."""
    is_snapshot = folder.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", folder.name)
    return folder.name if is_snapshot else None


def local_adapter(name_or_path: str) -> Path | None:
    """Return the folder of an adapter, None for a Hub id. Quick: nothing is fetched.

    Raises:
        InputError: neither a folder nor a Hub id.
    """
    path = local_path(name_or_path)
    kind = path_kind(path)
    if kind == "folder":
        return path
    if kind is not None:
        raise InputError(
            f"{name_or_path}: is a file, not an adapter folder",
            hint="name the folder that holds adapter_config.json",
        )
    _require_hub_id(name_or_path, "adapter")
    return None


def check_base_name(name_or_path: str) -> None:
    """Refuse what neither is there nor can be a Hub id. Quick: nothing is fetched.

    Raises:
        InputError: neither.
    """
    if path_kind(local_path(name_or_path)) is None:
        _require_hub_id(name_or_path, "base model")


def fetch_base_config(name_or_path: str, revision: str | None = None) -> Path:
    """Return the local path of a base model's ``config.json``; from the Hub only that file.

    Raises:
        InputError: no such folder, or a Hub id that cannot be reached.
    """
    path = local_path(name_or_path)
    kind = path_kind(path)
    if kind == "folder":
        config = path / "config.json"
        if path_kind(config) is None:
            raise InputError(
                f"{name_or_path}: has no config.json",
                hint="--base names a folder or Hub id of the base model; "
                "--base-config names its config.json alone",
            )
        return config
    if kind is not None:
        return path
    _require_hub_id(name_or_path, "base model")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name_or_path, "config.json", revision=revision))
    except Exception as error:
        raise _unreachable(name_or_path, "base model", error) from error


def fetch_base_weights(name_or_path: str, revision: str | None = None) -> Path:
    """Return the local folder of a base model's weights; a Hub id is downloaded whole.

    Raises:
        InputError: no such folder, no weights in it, or a Hub id that cannot be reached.
    """
    path = local_path(name_or_path)
    if path_kind(path) != "folder":
        _require_hub_id(name_or_path, "base model")
        from huggingface_hub import snapshot_download

        try:
            path = Path(
                snapshot_download(
                    name_or_path, revision=revision, allow_patterns=["*.json", "*.safetensors"]
                )
            )
        except Exception as error:
            raise _unreachable(name_or_path, "base model", error) from error
    if not list(path.glob("*.safetensors")):
        raise InputError(
            f"{name_or_path}: holds no .safetensors weights",
            hint="name a folder with the base model's weights, or use --random-base to verify "
            "on random weights of the same shape",
        )
    return path


def upload_files(
    repo: str,
    folder: Path,
    hashes: dict[str, str],
    *,
    create: bool = False,
    private: bool = False,
    revision: str | None = None,
) -> str:
    """Upload files of a folder to a model repository in one commit; return the commit's address.

    hashes: sha256 of each file, by name; a file that changed meanwhile stops the upload.

    Raises:
        InputError: ``repo`` is no Hub id, or a file is not the expected one.
        OutputError: the Hub refused, or is out of reach.
    """
    _require_hub_id(repo, "repository")
    from huggingface_hub import CommitOperationAdd, HfApi

    operations = [CommitOperationAdd(name, str(folder / name)) for name in hashes]
    for operation in operations:
        name = operation.path_in_repo
        if operation.upload_info.sha256.hex() != hashes[name]:
            raise InputError(f"{folder / name}: changed since it was verified")
    api = HfApi()
    try:
        if create:
            api.create_repo(repo, private=private or None, exist_ok=True)
        message = "Upload shards verified by moelora"
        commit = api.create_commit(repo, operations, commit_message=message, revision=revision)
    except Exception as error:
        raise OutputError(
            f"{repo}: the upload failed ({type(error).__name__}: {_first_line(error)})",
            hint="--create makes a repository that is not there; HF_TOKEN needs write access",
        ) from error
    return str(commit.commit_url)


def local_path(name_or_path: str) -> Path:
    """Return the path that a user typed, ``~`` expanded.

    Raises:
        InputError: ``~name`` of a user that this machine does not know.
    """
    try:
        return Path(name_or_path).expanduser()
    except RuntimeError as error:
        raise InputError(
            f"{name_or_path}: no such user", hint="./~name is a folder whose name starts with ~"
        ) from error


def path_kind(path: Path) -> Literal["folder", "file"] | None:
    """Return what stands at a path: a folder, or anything else; None for nothing.

    Raises:
        InputError: that cannot be told: no permission, or a name that no disk can hold.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path}: cannot be read: {why}", hint="check the path and its permissions"
        ) from error
    return "folder" if stat.S_ISDIR(mode) else "file"


def _require_hub_id(name: str, what: str) -> None:
    if not _HUB_ID.fullmatch(name):
        raise InputError(
            f"{name}: no such folder, and not a Hub id of the form owner/name",
            hint=f"check the path of the {what}",
        )


def _unreachable(name: str, what: str, error: Exception) -> InputError:
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    return InputError(
        f"{name}: the {what} is no local folder and could not be fetched from the Hub "
        f"({type(error).__name__}: {_first_line(error)})",
        hint="HF_HUB_OFFLINE is set: download it first or name a local folder"
        if offline
        else "check the name, the revision and the network, or name a local folder",
    )


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, without any token that may stand in it."""
    text = (str(error).splitlines() or [""])[0]
    return re.sub(r"hf_\w{8,}|(?<=[Bb]earer )\S+", "<token>", text)
