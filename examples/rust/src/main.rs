//! A memory system's end of the bus with redis and rmp-serde.
//!
//!     cargo run -- prefetch -6ed9a448787a198f 3f5c45ecbab5e9fd
//!     cargo run -- evict 3f5c45ecbab5e9fd
//!     cargo run -- follow place.txt        # stop it, start it again: it goes on where it stood
//!
//! KVBUS_REDIS_URL and KVBUS_NAMESPACE say where. Every line on stdout is JSON.

mod hash;
mod messages;
mod place;

use std::collections::BTreeSet;
use std::error::Error;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use redis::streams::{StreamId, StreamInfoStreamReply, StreamReadReply};
use redis::{cmd, Connection};
use serde::de::DeserializeOwned;
use serde_json::json;

use hash::ChunkHash;
use messages::{Command, RequestFinished, Results};
use place::Place;

type Outcome<T> = Result<T, Box<dyn Error>>;

const TTL_MS: u64 = 30_000;

struct Bus {
    prefix: String,
    connection: Connection,
}

impl Bus {
    fn open() -> Outcome<Self> {
        let url = env::var("KVBUS_REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379/0".into());
        let namespace = env::var("KVBUS_NAMESPACE").unwrap_or_else(|_| "default".into());
        let connection = redis::Client::open(url)?.get_connection_with_timeout(Duration::from_secs(2))?;
        // A blocked XREAD must time out on our side later than on the server's.
        connection.set_read_timeout(Some(Duration::from_secs(10)))?;
        // The braces are part of the keys.
        Ok(Self { prefix: format!("kvbus:{{{namespace}}}:"), connection })
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The id of the newest entry ever, resolved once: `$` in a loop would lose what comes between two reads.
    fn end_of(&mut self, stream: &str) -> Outcome<String> {
        let key = self.key(stream);
        if !cmd("EXISTS").arg(&key).query::<bool>(&mut self.connection)? {
            return Ok("0-0".into());
        }
        let info: StreamInfoStreamReply = cmd("XINFO").arg("STREAM").arg(&key).query(&mut self.connection)?;
        Ok(info.last_generated_id)
    }

    fn read(&mut self, stream: &str, cursor: &str, block_ms: u64) -> Outcome<Vec<StreamId>> {
        let key = self.key(stream);
        let reply: Option<StreamReadReply> = cmd("XREAD")
            .arg("COUNT")
            .arg(32)
            .arg("BLOCK")
            .arg(block_ms)
            .arg("STREAMS")
            .arg(key)
            .arg(cursor)
            .query(&mut self.connection)?;
        Ok(reply.into_iter().flat_map(|found| found.keys).flat_map(|stream| stream.ids).collect())
    }

    /// Who is registered and alive: each of them owes a result.
    fn workers(&mut self) -> Outcome<BTreeSet<String>> {
        let names: Vec<String> = cmd("HKEYS").arg(self.key("workers")).query(&mut self.connection)?;
        let mut alive = BTreeSet::new();
        for name in names {
            if cmd("EXISTS").arg(self.key(&format!("live:{name}"))).query::<bool>(&mut self.connection)? {
                alive.insert(name);
            }
        }
        Ok(alive)
    }

    /// The server's clock; ours may be wrong.
    fn now_ms(&mut self) -> Outcome<u64> {
        let (seconds, micros): (u64, u64) = cmd("TIME").query(&mut self.connection)?;
        Ok(seconds * 1000 + micros / 1000)
    }

    fn send(&mut self, kind: &str, command: &Command) -> Outcome<String> {
        let id = new_id()?;
        let body = rmp_serde::to_vec_named(command)?;
        // Should the reply be lost: send the same entry, id and all, once more. It is carried out once.
        cmd("XADD")
            .arg(self.key("commands"))
            .arg("MAXLEN")
            .arg("~")
            .arg(100_000)
            .arg("*")
            .arg("v")
            .arg("1")
            .arg("type")
            .arg(kind)
            .arg("id")
            .arg(&id)
            .arg("body")
            .arg(body)
            .query::<String>(&mut self.connection)?;
        Ok(id)
    }
}

/// An entry's message, whichever form it came in.
fn message<T: DeserializeOwned>(entry: &StreamId) -> Outcome<T> {
    match entry.get::<Vec<u8>>("body") {
        Some(body) => Ok(rmp_serde::from_slice(&body)?),
        None => Ok(serde_json::from_str(&entry.get::<String>("json").unwrap_or_default())?),
    }
}

fn new_id() -> Outcome<String> {
    let mut bytes = [0u8; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn command(bus: &mut Bus, kind: &str, texts: &[String]) -> Outcome<i32> {
    let mut cursor = bus.end_of("results")?; // first of all: no answer can be missed
    let chunk_hashes = texts.iter().map(|text| ChunkHash::parse(text)).collect::<Result<_, _>>()?;
    let command = Command {
        issued_at_ms: Some(bus.now_ms()?),
        issuer: Some("rust-example".into()),
        chunk_hashes,
        lookup_id: Some("example".into()),
        ttl_ms: Some(TTL_MS),
        ..Command::default()
    };
    let mut waiting = bus.workers()?;
    let id = bus.send(kind, &command)?;
    let deadline = Instant::now() + Duration::from_millis(TTL_MS + 5_000);
    let mut failed = false;
    while !waiting.is_empty() && Instant::now() < deadline {
        for entry in bus.read("results", &cursor, 1_000)? {
            cursor.clone_from(&entry.id);
            let Ok(answers) = message::<Results>(&entry) else { continue };
            for result in answers.results.iter().filter(|result| result.command_id == id) {
                println!(
                    "{}",
                    json!({"worker": answers.worker, "status": result.status, "counts": result.counts})
                );
                if result.is_final() {
                    waiting.remove(&answers.worker);
                    failed |= result.went_wrong();
                }
            }
        }
    }
    for worker in &waiting {
        println!("{}", json!({"worker": worker, "status": "no answer"}));
    }
    Ok(i32::from(failed || !waiting.is_empty()))
}

fn follow(bus: &mut Bus, path: &Path, from_start: bool) -> Outcome<i32> {
    let mut place = match Place::load(path)? {
        Some(place) => place,
        None if from_start => Place::at("0-0"),
        None => Place::at(bus.end_of("events")?),
    };
    loop {
        let entries = match bus.read("events", &place.cursor, 2_000) {
            Ok(entries) => entries,
            Err(error) => {
                eprintln!("the bus is away, trying again: {error}");
                thread::sleep(Duration::from_millis(500));
                if let Ok(opened) = Bus::open() {
                    *bus = opened;
                }
                continue;
            }
        };
        for entry in entries {
            if entry.get::<String>("type").as_deref() == Some("request.finished") {
                match message::<RequestFinished>(&entry) {
                    Ok(event) => tell(&event, &mut place),
                    Err(error) => eprintln!("entry {} passed over: {error}", entry.id),
                }
            }
            place.cursor = entry.id;
            place.save(path)?; // after the event was dealt with: nothing is lost, and repeats are known
        }
    }
}

fn tell(event: &RequestFinished, place: &mut Place) {
    if let Some(missed) = place.take(&event.publisher, event.epoch, event.seq) {
        let hashes: Vec<String> = event.chunk_hashes.iter().map(ChunkHash::to_string).collect();
        let line = json!({
            "request_id": event.request_id,
            "session": event.context.get("session"),
            "chunk_hashes": hashes,
            "missed": missed,
        });
        println!("{line}");
    }
}

fn run(arguments: &[String]) -> Outcome<i32> {
    match arguments.split_first() {
        Some((what, hashes)) if matches!(what.as_str(), "prefetch" | "evict") && !hashes.is_empty() => {
            command(&mut Bus::open()?, what, hashes)
        }
        Some((what, rest)) if what == "follow" && !rest.is_empty() => {
            follow(&mut Bus::open()?, Path::new(&rest[0]), rest.iter().any(|item| item == "--from-start"))
        }
        _ => {
            eprintln!("usage: kvbus-example prefetch|evict HASH...  |  follow PLACE [--from-start]");
            Ok(2)
        }
    }
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    process::exit(run(&arguments).unwrap_or_else(|error| {
        eprintln!("{error}");
        1
    }));
}

#[cfg(test)]
mod golden {
    use super::*;

    fn entries() -> Vec<serde_json::Value> {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../../docs/golden.json")).unwrap();
        golden["entries"].as_array().unwrap().clone()
    }

    fn body(entry: &serde_json::Value) -> Vec<u8> {
        let text = entry["body_hex"].as_str().unwrap();
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    }

    fn named(name: &str) -> serde_json::Value {
        entries().into_iter().find(|entry| entry["name"] == name).unwrap()
    }

    #[test]
    fn commands_are_written_to_the_byte() {
        let hashes = ["-6ed9a448787a198f", "-4ca98d8c9e52152e", "3f5c45ecbab5e9fd"];
        let chunk_hashes: Vec<_> = hashes.iter().map(|text| ChunkHash::parse(text).unwrap()).collect();
        let evict = Command { chunk_hashes: chunk_hashes.clone(), ..Command::default() };
        assert_eq!(rmp_serde::to_vec_named(&evict).unwrap(), body(&named("evict")));
        let prefetch = Command {
            issued_at_ms: Some(1_764_480_000_000),
            issuer: Some("agentos".into()),
            chunk_hashes,
            lookup_id: Some("turn_prefetch".into()),
            ..Command::default()
        };
        assert_eq!(rmp_serde::to_vec_named(&prefetch).unwrap(), body(&named("prefetch")));
    }

    #[test]
    fn events_and_results_are_read() {
        let event: RequestFinished = rmp_serde::from_slice(&body(&named("request.finished"))).unwrap();
        assert_eq!(event.chunk_hashes[0].to_string(), "-6ed9a448787a198f");
        assert_eq!(event.seq, 7);
        let results: Results = rmp_serde::from_slice(&body(&named("results"))).unwrap();
        assert_eq!(results.results[0].counts["loaded"], 1);
        assert!(!results.results[1].is_final());
    }
}
