"""Where a log is: a folder or a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import InvalidError
from tidegate.log.log import Log, bootstrap_servers, folder_path, is_kafka, open_log


def test_a_plain_path_or_file_url_is_a_folder(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}", f"file://localhost{tmp_path}"):
        with open_log(url) as log:
            assert isinstance(log, Log)
            assert log.path == tmp_path
    assert folder_path("~/x") == Path.home() / "x"
    assert folder_path("file:///a%20b") == Path("/a b")
    assert not is_kafka("kafka")


@pytest.mark.parametrize("url", ["", "http://x", "s3://bucket/x", "file://other/x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidError, match="folder"):
        open_log(url)


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("kafka://host", "host:9092"),
        ("kafka://host:1234", "host:1234"),
        ("kafka://a:1,b", "a:1,b:9092"),
        ("kafka://[::1]:9092/", "[::1]:9092"),
        ("kafka://[::1]", "[::1]:9092"),
    ],
)
def test_servers_of_a_cluster(url: str, servers: str) -> None:
    assert is_kafka(url)
    assert bootstrap_servers(url) == servers


@pytest.mark.parametrize("url", ["kafka://", "kafka://user:secret@host", "kafka://host/topic"])
def test_secrets_and_paths_do_not_belong_into_the_url(url: str) -> None:
    with pytest.raises(InvalidError, match="command-config"):
        bootstrap_servers(url)


def test_client_settings_are_for_clusters_only(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="is a folder"):
        open_log(str(tmp_path), client={"acks": "all"})
