"""The wire: typed messages over bytes. Pure, no sockets."""

from kvbus.protocol.codec import (
    Envelope,
    Message,
    decode_entry,
    encode_entry,
    encode_json_entry,
    new_message_id,
    to_plain,
)
from kvbus.protocol.commands import DDR, SSD, Command, Evict, Lookup, Ping, Prefetch, Tags, Target
from kvbus.protocol.dead import DeadLetter
from kvbus.protocol.events import Event, FinishReason, RequestFinished, WorkerGap, WorkerStarted, WorkerStopped
from kvbus.protocol.hashes import ChunkHash, blake3_chain, format_hash, hash_fingerprint, parse_hash
from kvbus.protocol.results import ChunkLists, CommandResult, Counts, ErrorInfo, Held, Outcome, Results, Status

__all__ = [
    "DDR",
    "SSD",
    "ChunkHash",
    "ChunkLists",
    "Command",
    "CommandResult",
    "Counts",
    "DeadLetter",
    "Envelope",
    "ErrorInfo",
    "Event",
    "Evict",
    "FinishReason",
    "Held",
    "Lookup",
    "Message",
    "Outcome",
    "Ping",
    "Prefetch",
    "RequestFinished",
    "Results",
    "Status",
    "Tags",
    "Target",
    "WorkerGap",
    "WorkerStarted",
    "WorkerStopped",
    "blake3_chain",
    "decode_entry",
    "encode_entry",
    "encode_json_entry",
    "format_hash",
    "hash_fingerprint",
    "new_message_id",
    "parse_hash",
    "to_plain",
]
