// A memory system's end of the bus with ioredis and @msgpack/msgpack.
//
//   npm install
//   node memory_client.mjs prefetch -6ed9a448787a198f 3f5c45ecbab5e9fd
//   node memory_client.mjs evict 3f5c45ecbab5e9fd
//   node memory_client.mjs follow place.json [--from-start] [--count N]    # start it again: it goes on where it stood
//
// KVBUS_REDIS_URL and KVBUS_NAMESPACE say where. Every line on stdout is JSON.
import { randomBytes } from "node:crypto";
import { existsSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { decode, encode } from "@msgpack/msgpack";
import Redis from "ioredis";

const TTL_MS = 30_000;
const FINAL = new Set(["done", "partial", "expired", "rejected", "not_applicable", "failed"]);
// A 64-bit hash does not fit into a JavaScript number: integers of that size go in and out as BigInt.
const BIG = { useBigInt64: true };

// A chunk hash's text as it stands in msgpack: a 64-bit integer, or a digest of 32 bytes.
export function hashValue(text) {
  if (text.length === 64) return Uint8Array.from(Buffer.from(text, "hex"));
  return text.startsWith("-") ? -BigInt(`0x${text.slice(1)}`) : BigInt(`0x${text}`);
}

// The other way. Never padded: hashes are compared as text.
export function hashText(value) {
  if (typeof value === "string") return value;
  return value instanceof Uint8Array ? Buffer.from(value).toString("hex") : BigInt(value).toString(16);
}

// An entry's message, whichever form it came in. entry: [id, [name, value, ...]] of Buffers.
export function decodeEntry(pairs) {
  const fields = {};
  for (let i = 0; i < pairs.length; i += 2) fields[pairs[i].toString()] = pairs[i + 1];
  const message = fields.body ? decode(fields.body, BIG) : JSON.parse(fields.json.toString());
  return { type: fields.type.toString(), message };
}

export function encodeCommand(body) {
  return Buffer.from(encode(body, BIG));
}

class Bus {
  constructor(url, namespace) {
    this.prefix = `kvbus:{${namespace}}:`; // the braces are part of the keys
    // A lost reply is ours to judge, so nothing is sent a second time behind our back.
    const options = { maxRetriesPerRequest: 0, autoResendUnfulfilledCommands: false };
    this.redis = new Redis(url, options);
    this.redis.on("error", () => {});
  }

  key(name) {
    return this.prefix + name;
  }

  // The id of the newest entry ever, resolved once: `$` in a loop would lose what comes between two reads.
  async endOf(stream) {
    if (!(await this.redis.exists(this.key(stream)))) return "0-0";
    const info = await this.redis.xinfo("STREAM", this.key(stream));
    return info[info.indexOf("last-generated-id") + 1];
  }

  async read(stream, cursor, blockMs) {
    const found = await this.redis.xreadBuffer("COUNT", 32, "BLOCK", blockMs, "STREAMS", this.key(stream), cursor);
    return found ? found[0][1].map(([id, pairs]) => [id.toString(), pairs]) : [];
  }

  // Who is registered and alive: each of them owes a result.
  async workers() {
    const names = await this.redis.hkeys(this.key("workers"));
    const alive = await Promise.all(names.map((name) => this.redis.exists(this.key(`live:${name}`))));
    return names.filter((_, place) => alive[place]);
  }
}

async function command(bus, kind, hashes) {
  let cursor = await bus.endOf("results"); // first of all: no answer can be missed
  const [seconds, micros] = await bus.redis.time(); // the server's clock; ours may be wrong
  const body = encodeCommand({
    chunk_hashes: hashes.map(hashValue),
    lookup_id: "example",
    ttl_ms: BigInt(TTL_MS),
    issued_at_ms: BigInt(seconds) * 1000n + BigInt(micros) / 1000n,
    issuer: "node-example",
  });
  const id = randomBytes(16).toString("hex");
  const waiting = new Set(await bus.workers());
  // Should the reply be lost: send the same entry, id and all, once more. It is carried out once.
  const fields = ["v", "1", "type", kind, "id", id, "body", body];
  await bus.redis.xadd(bus.key("commands"), "MAXLEN", "~", 100_000, "*", ...fields);
  const deadline = Date.now() + TTL_MS + 5_000;
  let failed = false;
  while (waiting.size && Date.now() < deadline) {
    for (const [entryId, pairs] of await bus.read("results", cursor, 1_000)) {
      cursor = entryId;
      const { message } = decodeEntry(pairs);
      for (const result of message.results ?? []) {
        if (result.command_id !== id) continue;
        tell({ worker: message.worker, status: result.status, counts: result.counts ?? {} });
        if (!FINAL.has(result.status)) continue; // `deferred` is not final: another one follows
        waiting.delete(message.worker);
        failed ||= ["failed", "rejected", "expired"].includes(result.status);
      }
    }
  }
  for (const worker of waiting) tell({ worker, status: "no answer" });
  return waiting.size || failed ? 1 : 0;
}

async function follow(bus, state, fromStart, count) {
  const place = existsSync(state)
    ? JSON.parse(readFileSync(state, "utf8"))
    : { cursor: fromStart ? "0-0" : await bus.endOf("events"), publishers: {} };
  for (let told = 0; !count || told < count; ) {
    let entries;
    try {
      entries = await bus.read("events", place.cursor, 2_000);
    } catch (error) {
      console.error(`the bus is away, trying again: ${error.message}`);
      await sleep(500);
      continue;
    }
    for (const [entryId, pairs] of entries) {
      const { type, message } = decodeEntry(pairs);
      place.cursor = entryId;
      if (type === "request.finished" && finished(message, place.publishers)) told += 1;
      // After the event was dealt with: nothing is lost, and repeats are known.
      writeFileSync(`${state}.part`, JSON.stringify(place));
      renameSync(`${state}.part`, state);
      if (count && told >= count) break;
    }
  }
  return 0;
}

// Tell one request, unless it is a repeat. publishers: for each, [epoch, the seq that comes next].
function finished(event, publishers) {
  const [epoch, seq] = [Number(event.epoch), Number(event.seq)];
  const known = publishers[event.publisher];
  if (known && (epoch < known[0] || (epoch === known[0] && seq < known[1]))) return false;
  const missed = known ? (epoch === known[0] ? seq - known[1] : seq) : 0;
  publishers[event.publisher] = [epoch, seq + 1];
  tell({
    request_id: event.request_id,
    session: event.context?.session ?? null,
    chunk_hashes: (event.chunk_hashes ?? []).map(hashText),
    missed,
  });
  return true;
}

function tell(line) {
  console.log(JSON.stringify(line, (_, value) => (typeof value === "bigint" ? Number(value) : value)));
}

async function main([what, ...rest]) {
  const { KVBUS_REDIS_URL: url = "redis://127.0.0.1:6379/0", KVBUS_NAMESPACE: namespace = "default" } = process.env;
  const option = (name) => rest[rest.indexOf(name) + 1];
  const bus = new Bus(url, namespace);
  try {
    if ((what === "prefetch" || what === "evict") && rest.length) return await command(bus, what, rest);
    if (what === "follow" && rest.length) {
      const count = rest.includes("--count") ? Number(option("--count")) : 0;
      return await follow(bus, rest[0], rest.includes("--from-start"), count);
    }
    console.error("usage: memory_client.mjs prefetch|evict HASH...  |  follow STATE [--from-start] [--count N]");
    return 2;
  } finally {
    bus.redis.disconnect();
  }
}

if (process.argv[1] === new URL(import.meta.url).pathname) process.exitCode = await main(process.argv.slice(2));
