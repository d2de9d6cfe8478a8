"""What a job has seen and finished, by id. It lies on disk: its memory does not grow with the job."""

import json
import sqlite3

TABLES = """
CREATE TABLE finished (
    id TEXT, digest TEXT, is_asked INTEGER DEFAULT 0, PRIMARY KEY (id, digest)
) WITHOUT ROWID;
CREATE TABLE seen (id TEXT PRIMARY KEY, line INTEGER, times INTEGER DEFAULT 1) WITHOUT ROWID;
"""
SEE = """
INSERT INTO seen (id, line) VALUES (?, ?) ON CONFLICT DO UPDATE SET times = times + 1 RETURNING line, times
"""
STALE = "FROM finished WHERE NOT is_asked AND id IN (SELECT id FROM seen)"
CACHE_KIB = 16_384


class Ledger:
    """Ids of rows, in a temporary file that only this object sees."""

    def __init__(self):
        self._tables = sqlite3.connect("", isolation_level=None)  # "": temporary, deleted when closed
        for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
            self._tables.execute(f"PRAGMA {pragma}")
        self._tables.executescript(TABLES)

    def finish(self, id: str | int, digest: str) -> None:
        """A row of this id and digest is in the output."""
        insert = "INSERT OR IGNORE INTO finished (id, digest) VALUES (?, ?)"
        self._tables.execute(insert, (json.dumps(id), digest))

    def is_finished(self, id: str | int, digest: str) -> bool:
        """Whether a row of this id and digest is in the output. Remembers that it was asked for."""
        update = "UPDATE finished SET is_asked = 1 WHERE id = ? AND digest = ?"
        return self._tables.execute(update, (json.dumps(id), digest)).rowcount > 0

    def see(self, id: str | int, line: int) -> tuple[int, int]:
        """A row of the input: (line on which its id came first, how many times it has come)."""
        return self._tables.execute(SEE, (json.dumps(id), line)).fetchone()

    def start_again(self) -> None:
        """The input is read from its beginning once more."""
        self._tables.execute("DELETE FROM seen")

    def stale(self, limit: int) -> tuple[int, list[str | int]]:
        """Finished rows that nobody asked for, though their ids were seen: how many, and some of the ids."""
        (count,) = self._tables.execute(f"SELECT count(*) {STALE}").fetchone()
        found = self._tables.execute(f"SELECT id {STALE} LIMIT ?", (limit,))
        return count, [json.loads(id) for (id,) in found]
