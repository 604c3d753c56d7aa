"""Every key of a namespace. The braces are a Redis Cluster hash tag: one namespace, one slot."""

from __future__ import annotations

from kvbus.settings import check_name


class Keys:
    """The keys of one namespace, as text."""

    def __init__(self, namespace: str) -> None:
        self.namespace = check_name("namespace", namespace)
        self.prefix = f"kvbus:{{{namespace}}}:"
        self.events = self.prefix + "events"
        self.commands = self.prefix + "commands"
        self.results = self.prefix + "results"
        self.dead = self.prefix + "dead"
        self.dead_seen = self.prefix + "dead:seen"
        """Sorted set of the newest refused entries, so that each becomes one dead letter however many refuse it."""
        self.workers = self.prefix + "workers"
        self.publishers = self.prefix + "publishers"

    def live(self, name: str) -> str:
        return f"{self.prefix}live:{name}"

    def worker(self, name: str) -> str:
        return f"{self.prefix}worker:{name}"

    def reader(self, name: str) -> str:
        return f"{self.prefix}reader:{check_name('reader', name)}"

    def stats(self, name: str) -> str:
        return f"{self.prefix}stats:{name}"

    def memory(self, part: str) -> str:
        return f"{self.prefix}memory:{part}"

    @property
    def streams(self) -> dict[str, str]:
        """Short name to key, for tools that show all streams."""
        return {"events": self.events, "commands": self.commands, "results": self.results, "dead": self.dead}


def worker_name(instance: str, rank: int) -> str:
    """`<instance>/<rank>`: stable across restarts."""
    return f"{check_name('instance', instance)}/{rank}"
