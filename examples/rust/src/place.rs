//! How far a reader has come: the cursor, and for each publisher what comes next. Only the standard library.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub cursor: String,
    /// publisher -> (epoch, the seq that comes next)
    pub publishers: BTreeMap<String, (u64, u64)>,
}

impl Place {
    pub fn at(cursor: impl Into<String>) -> Self {
        Self { cursor: cursor.into(), publishers: BTreeMap::new() }
    }

    /// How many events are missing before this one, or None for a repeat (a batch that was sent again).
    pub fn take(&mut self, publisher: &str, epoch: u64, seq: u64) -> Option<u64> {
        let missed = match self.publishers.get(publisher) {
            Some(&known) if (epoch, seq) < known => return None,
            Some(&(known_epoch, next)) if known_epoch == epoch => seq - next,
            Some(_) => seq,
            None => 0,
        };
        self.publishers.insert(publisher.to_owned(), (epoch, seq + 1));
        Some(missed)
    }

    /// One line for the cursor, then one for each publisher.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut text = format!("{}\n", self.cursor);
        for (name, (epoch, next)) in &self.publishers {
            text += &format!("{epoch} {next} {name}\n");
        }
        let unfinished = path.with_extension("part");
        fs::write(&unfinished, text)?;
        fs::rename(unfinished, path)
    }

    /// None where nothing was saved yet.
    pub fn load(path: &Path) -> io::Result<Option<Self>> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let broken = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", path.display()));
        let mut lines = text.lines();
        let mut place = Self::at(lines.next().ok_or_else(broken)?);
        for line in lines {
            let mut parts = line.splitn(3, ' ');
            let mut number = || parts.next().and_then(|part| part.parse().ok()).ok_or_else(broken);
            let (epoch, next) = (number()?, number()?);
            let name = parts.next().ok_or_else(broken)?;
            place.publishers.insert(name.to_owned(), (epoch, next));
        }
        Ok(Some(place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_and_holes() {
        let mut place = Place::at("0-0");
        assert_eq!(place.take("p", 1, 5), Some(0));
        assert_eq!(place.take("p", 1, 5), None);
        assert_eq!(place.take("p", 1, 4), None);
        assert_eq!(place.take("p", 1, 9), Some(3));
        assert_eq!(place.take("p", 2, 0), Some(0));
        assert_eq!(place.take("p", 1, 10), None);
        assert_eq!(place.take("p", 3, 2), Some(2));
        assert_eq!(place.take("q", 1, 7), Some(0));
    }

    #[test]
    fn a_restart_goes_on() {
        let path = std::env::temp_dir().join(format!("kvbus-place-{}", std::process::id()));
        assert_eq!(Place::load(&path).unwrap(), None);
        let mut place = Place::at("17-3");
        place.take("name with blanks", 1, 5);
        place.save(&path).unwrap();
        assert_eq!(Place::load(&path).unwrap(), Some(place));
        fs::remove_file(path).unwrap();
    }
}
