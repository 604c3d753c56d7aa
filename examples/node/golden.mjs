// Checks this example's codec against golden.json: node golden.mjs ../../docs/golden.json
import { readFileSync } from "node:fs";
import { decode, encode } from "@msgpack/msgpack";
import { decodeEntry, encodeCommand, hashText, hashValue } from "./memory_client.mjs";

const golden = JSON.parse(readFileSync(process.argv[2], "utf8"));
let checked = 0;
function same(what, found, wanted) {
  if (found !== wanted) throw new Error(`${what}: ${found} is not ${wanted}`);
  checked += 1;
}
// Values without their number types: 3n and 3 are one number in JSON, and a hash is its text.
function plain(value, key = "") {
  if (typeof value === "bigint" || typeof value === "number") return key === "hash" ? hashText(value) : Number(value);
  if (value instanceof Uint8Array) return Buffer.from(value).toString(key === "hash" ? "hex" : "base64");
  if (Array.isArray(value)) return value.map((item) => plain(item, HASHES.has(key) ? "hash" : ""));
  if (value && typeof value === "object")
    return Object.fromEntries(Object.keys(value).sort().map((name) => [name, plain(value[name], name)]));
  return value;
}
const HASHES = new Set(["chunk_hashes", "missing", "in_use", "busy", "no_space", "unsupported", "tier_stuck", "failed"]);

for (const entry of golden.entries) {
  const pairs = [Buffer.from("type"), Buffer.from(entry.type), Buffer.from("body"), Buffer.from(entry.body_hex, "hex")];
  const text = plain(JSON.parse(entry.json));
  same(entry.name, JSON.stringify(plain(decodeEntry(pairs).message)), JSON.stringify(text));
  const again = encodeCommand(decode(Buffer.from(entry.body_hex, "hex"), { useBigInt64: true }));
  same(`${entry.name} again`, JSON.stringify(plain(decode(again, { useBigInt64: true }))), JSON.stringify(text));
}
for (const { text, msgpack_hex: hex } of golden.hashes) {
  same(text, hashText(decode(Buffer.from(hex, "hex"), { useBigInt64: true })), text);
  same(text, hashText(decode(encode(hashValue(text), { useBigInt64: true }), { useBigInt64: true })), text);
}
console.log(`${checked} checks`);
