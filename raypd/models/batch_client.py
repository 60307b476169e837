"""The HTTP client of `model.endpoint.batch`: files and batches of OpenAI's batch API."""

import json
import time
from collections.abc import Iterator
from typing import Any

from raypd.models.endpoint_client import EndpointClient, HttpReply

# Seconds within which a server answers a batch, or lets it expire.
BATCH_SECONDS = 24 * 3600
# Bytes of a file of answers: 50,000 answers, many of them long, with log probabilities.
_MAX_FILE_BYTES = 1 << 30
# The bytes of the last answer that are kept, for the message if its form is unexpected.
_KEPT_BYTES = 1 << 16
# Batches per page of their list.
_PAGE = 100


class BatchClient(EndpointClient):
    """Uploads files and makes, lists and reads batches.

    Attributes:
        last_url: The URL that answered last.
        last_text: The beginning of what it answered.
    """

    last_url = ""
    last_text = ""
    # The file for which a batch was requested last.
    _requested_file = ""

    def create_batch(self, lines: bytearray, run: str, max_bytes: int) -> str:
        """Upload requests and make a batch of them.

        Args:
            lines: The requests, a JSON object per line.
            run: The fingerprint of the run, by which a later engine recognizes its batches.
            max_bytes: Bytes that each of the server's answers may have.

        Returns:
            The id of the batch.
        """
        file = self.reply(
            f"{self.base_url}/files",
            max_bytes,
            data={"purpose": "batch"},
            files={"file": ("raypd.jsonl", lines)},
        )
        request = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"raypd": run},
        }
        batch = self.reply(f"{self.base_url}/batches", max_bytes, json=request)
        return str(batch.get("id"))

    def batch(self, name: str, max_bytes: int) -> dict[str, Any]:
        """Return what the server says about a batch."""
        return self.reply(f"{self.base_url}/batches/{name}", max_bytes)

    def recent_batches(self, max_bytes: int) -> Iterator[dict[str, Any]]:
        """Yield the server's batches of the last day, the latest first.

        Args:
            max_bytes: Bytes that the description of one batch may have.
        """
        after = ""
        while True:
            url = f"{self.base_url}/batches?limit={_PAGE}{after}"
            page = self.reply(url, _PAGE * max_bytes)
            batches = page.get("data", [])
            oldest = time.time() - BATCH_SECONDS
            recent = [batch for batch in batches if batch.get("created_at", 0) > oldest]
            yield from recent
            has_older = len(recent) < len(batches)
            if not recent or has_older or not page.get("has_more"):
                return
            after = f"&after={recent[-1]['id']}"

    def lines(self, file: str | None) -> list[dict[str, Any]]:
        """Return the JSON objects of a file of the server; none if there is no file."""
        if file is None:
            return []
        data = self.data(f"{self.base_url}/files/{file}/content", _MAX_FILE_BYTES)
        return [json.loads(line) for line in data.splitlines() if line.strip()]

    def data(self, url: str, max_bytes: int, **content: Any) -> bytearray:
        data = super().data(url, max_bytes, **content)
        self.failures_in_a_row = 0
        self.last_url = url
        self.last_text = data[:_KEPT_BYTES].decode(errors="replace")
        return data

    def request(self, url: str, max_bytes: int, **content: Any) -> HttpReply:
        # Of this client's requests, only the one that makes a batch has JSON. If an attempt for the
        # same file failed, it may have made the batch although its answer was lost.
        if "json" in content:
            file = content["json"]["input_file_id"]
            if file == self._requested_file:
                for batch in self.recent_batches(max_bytes):
                    if batch.get("input_file_id") == file:
                        return HttpReply(200, {}, bytearray(json.dumps(batch).encode()))
            self._requested_file = file
        return super().request(url, max_bytes, **content)
