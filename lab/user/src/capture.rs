//! Captures: what the maps of a real Cilium held, and what its tools printed, as files.
//!
//! A capture is a folder in the form that `lab/captures/README.md` describes: `maps/NAME.hex` (or
//! the `.hex` files directly in the folder), text files beside them, each of them possibly
//! compressed (`.gz`). A folder of faults holds several captures that share it, told apart by the
//! prefix of their file names.
//!
//! Nothing here touches the kernel. Every error names the file and the line.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt, fs, io,
    io::Read,
    path::{Path, PathBuf},
};

use flate2::read::MultiGzDecoder;
use inspector::cilium::layout::MapType;

/// Why a capture could not be read.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// Neither a folder nor one state of a faults folder.
    #[error(
        "{path}: no such capture: give a folder that holds maps/NAME.hex or NAME.hex files, or \
         FOLDER/PREFIX for one state of a faults folder"
    )]
    NotFound {
        /// What was asked for.
        path: PathBuf,
    },
    /// A folder without a single map.
    #[error("{path}: not a capture: no .hex or .hex.gz file in it or in its maps folder{hint}")]
    NoMaps {
        /// The folder.
        path: PathBuf,
        /// What else could have been meant; starts with `; ` or is empty.
        hint: String,
    },
    /// A file could not be read.
    #[error("{path}: {source}")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A compressed file is cut off or damaged.
    #[error("{path}: damaged or cut off gzip data ({source}); copy the capture again")]
    Gzip {
        /// The file.
        path: PathBuf,
        /// What the decoder said.
        source: io::Error,
    },
    /// A line of a map file is wrong.
    #[error("{path}:{line}: {problem}")]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What is wrong with it.
        problem: LineProblem,
    },
    /// The same file twice, plain and compressed.
    #[error("{path}: there is also {path}.gz; remove one of the two")]
    Twice {
        /// The plain file.
        path: PathBuf,
    },
    /// A text file that the capture does not hold.
    #[error("{capture}: holds no file {name} (nor {name}.gz)")]
    NoSuchFile {
        /// The capture.
        capture: PathBuf,
        /// Name relative to the capture.
        name: String,
    },
    /// A map that the capture does not hold.
    #[error("{capture}: holds no map {name}")]
    NoSuchMap {
        /// The capture.
        capture: PathBuf,
        /// Name of the map.
        name: String,
    },
    /// The name of an inner map's file has no key of its outer map.
    #[error("{path}: the name says that it is an inner map, but {problem}")]
    InnerName {
        /// The file.
        path: PathBuf,
        /// What is wrong with the name.
        problem: String,
    },
    /// An entry of a map of maps without its inner map.
    #[error(
        "{path}: the entry with key {key} of a map of maps needs its inner map, in \
         {name}.inner-{key}.hex beside it"
    )]
    NoInner {
        /// The file of the outer map.
        path: PathBuf,
        /// Name of the outer map.
        name: String,
        /// Key of the entry, hex.
        key: String,
    },
}

/// What is wrong with one line of a map file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineProblem {
    /// The first line is not a header.
    #[error(
        "expected the header `# type=N id=N key=N value=N max=N flags=0xN name=NAME`, found `{found}`"
    )]
    NoHeader {
        /// The line, shortened.
        found: String,
    },
    /// A field of the header is not there.
    #[error("the header has no `{field}=`")]
    MissingField {
        /// Name of the field.
        field: &'static str,
    },
    /// A field of the header is no number.
    #[error("the header's `{field}={found}` is not a number that fits 32 bits")]
    BadField {
        /// Name of the field.
        field: &'static str,
        /// What stands there.
        found: String,
    },
    /// A character that is no hexadecimal digit.
    #[error("the {part} has `{found}` at column {column}, which is not a hexadecimal digit")]
    NotHex {
        /// Key or value.
        part: Part,
        /// The character.
        found: char,
        /// Column in the line, from 1.
        column: usize,
    },
    /// An odd number of digits.
    #[error("the {part} has {digits} hexadecimal digits, an odd number")]
    OddHex {
        /// Key or value.
        part: Part,
        /// Number of digits.
        digits: usize,
    },
    /// Not as many bytes as the header says.
    #[error("the {part} has {found} bytes, the header says {expected}")]
    WrongLength {
        /// Key or value.
        part: Part,
        /// Bytes found.
        found: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// A per-CPU value that is no whole number of values.
    #[error(
        "the value has {found} bytes, which is no whole number of per-CPU values of {each} bytes"
    )]
    WrongPerCpuLength {
        /// Bytes found.
        found: usize,
        /// Bytes per CPU, padding included.
        each: usize,
    },
    /// A key without a value.
    #[error("there is a key but no value")]
    MissingValue,
    /// More than a key and a value.
    #[error("there is something after the value: `{found}`")]
    Trailing {
        /// What stands there.
        found: String,
    },
    /// A key that was there before.
    #[error("the key {key} was already on line {first}")]
    DuplicateKey {
        /// The key, hex.
        key: String,
        /// Line of its first occurrence.
        first: usize,
    },
    /// The closing line counts differently.
    #[error("the closing line says {said} entries, the file holds {found}: it was cut or edited")]
    WrongCount {
        /// Number in the closing line.
        said: usize,
        /// Entries found.
        found: usize,
    },
    /// More entries than the map can take.
    #[error("the file holds {found} entries, the header's max is {max}")]
    TooMany {
        /// Entries found.
        found: usize,
        /// `max=` of the header.
        max: u32,
    },
    /// Not UTF-8.
    #[error("not text (invalid UTF-8)")]
    NotText,
}

/// Which half of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The key.
    Key,
    /// The value.
    Value,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "key",
            Self::Value => "value",
        })
    }
}

/// What a map is created with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapSpec {
    /// Kernel map type number.
    pub map_type: MapType,
    /// Key size, bytes.
    pub key_size: u32,
    /// Value size, bytes; for per-CPU maps that of one CPU, without padding.
    pub value_size: u32,
    /// Capacity, entries.
    pub max_entries: u32,
    /// `BPF_F_*` flags of creation.
    pub flags: u32,
    /// The name that the kernel keeps: at most 15 bytes, so mostly a cut form of the pin's.
    pub name: String,
}

impl MapSpec {
    /// Bytes of one value as user space reads and writes it, for `cpus` possible CPUs.
    #[must_use]
    pub fn user_value_size(&self, cpus: usize) -> usize {
        let size = self.value_size as usize;
        if self.map_type.is_per_cpu() { size.next_multiple_of(8) * cpus } else { size }
    }

    /// Whether its values are other maps.
    #[must_use]
    pub fn is_map_in_map(&self) -> bool {
        matches!(self.map_type, MapType::ARRAY_OF_MAPS | MapType::HASH_OF_MAPS)
    }

    /// Whether entries of this type stand for kernel objects (programs, perf events) that a file
    /// cannot hold: such maps are created empty.
    #[must_use]
    pub fn holds_objects(&self) -> bool {
        matches!(self.map_type, MapType::PROG_ARRAY | MapType::PERF_EVENT_ARRAY)
    }
}

/// One entry of a captured map: raw bytes, as the kernel gave them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// The key.
    pub key: Vec<u8>,
    /// The value; for per-CPU maps the values of all captured CPUs in a row, each padded to 8
    /// bytes; empty in program and perf event arrays.
    pub value: Vec<u8>,
}

/// One captured map.
#[derive(Debug, Clone)]
pub struct CapturedMap {
    /// The file it comes from.
    pub path: PathBuf,
    /// Name of its pin below `tc/globals`.
    pub name: String,
    /// Id that the map had on the captured node.
    pub id: u32,
    /// What the kernel reported of it.
    pub spec: MapSpec,
    /// The entries, in the file's order.
    pub entries: Vec<Entry>,
    /// For maps of maps: the inner map of each entry, by the entry's key.
    pub inner: BTreeMap<Vec<u8>, CapturedMap>,
}

impl CapturedMap {
    /// Reads a `.hex` or `.hex.gz` file; `name` is the name of the pin.
    ///
    /// # Errors
    /// [`CaptureError`], naming the file and the line.
    pub fn read(path: &Path, name: &str) -> Result<Self, CaptureError> {
        let bytes = read_maybe_gz(path)?;
        let (spec, entries) = parse_map(&bytes).map_err(|(line, problem)| CaptureError::Line {
            path: path.to_owned(),
            line,
            problem,
        })?;
        Ok(Self {
            path: path.to_owned(),
            name: name.to_owned(),
            id: header_id(&bytes),
            spec,
            entries,
            inner: BTreeMap::new(),
        })
    }
}

/// The id in the first line, `# type=1 id=27 …`; 0 where it has none.
fn header_id(bytes: &[u8]) -> u32 {
    let header = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    std::str::from_utf8(header)
        .unwrap_or_default()
        .split_whitespace()
        .find_map(|word| word.strip_prefix("id=")?.parse().ok())
        .unwrap_or_default()
}

/// A capture: maps and text files.
#[derive(Debug, Clone)]
pub struct Capture {
    /// The folder.
    folder: PathBuf,
    /// `PREFIX` of the files, where the capture is one state of a faults folder.
    prefix: Option<String>,
    /// The capture that this one lies over.
    base: Option<Box<Capture>>,
    /// Maps by the name of their pin.
    maps: BTreeMap<String, CapturedMap>,
}

/// The captures that are part of the project: `lab/captures`.
#[must_use]
pub fn project_captures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("captures")
}

/// Every capture of the project that can be loaded by itself, the states of faults folders among
/// them, sorted: paths for [`Capture::open`].
///
/// # Errors
/// [`CaptureError::Read`] where a folder cannot be listed.
pub fn list_project() -> Result<Vec<PathBuf>, CaptureError> {
    let mut found = Vec::new();
    for folder in list(&project_captures())? {
        if !folder.is_dir() {
            continue;
        }
        let states = Capture::states(&folder)?;
        if states.is_empty() {
            found.push(folder);
        } else {
            found.extend(states.iter().map(|state| folder.join(state)));
        }
    }
    found.sort();
    Ok(found)
}

impl Capture {
    /// Opens a capture: a folder, or `FOLDER/PREFIX` for one state of a faults folder.
    ///
    /// All map files are read and checked.
    ///
    /// # Errors
    /// [`CaptureError`], naming the file and the line.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CaptureError> {
        let path = path.as_ref();
        if path.is_dir() {
            let maps_folder = path.join("maps");
            let maps = read_maps(if maps_folder.is_dir() { &maps_folder } else { path }, None)?;
            if maps.is_empty() {
                let states = Self::states(path)?;
                let hint = match states.first() {
                    Some(first) => format!(
                        "; it is a folder of {} states, open one: {}",
                        states.len(),
                        path.join(first).display()
                    ),
                    None => String::new(),
                };
                return Err(CaptureError::NoMaps { path: path.to_owned(), hint });
            }
            return Ok(Self { folder: path.to_owned(), prefix: None, base: None, maps });
        }
        let not_found = || CaptureError::NotFound { path: path.to_owned() };
        let prefix = path.file_name().and_then(OsStr::to_str).ok_or_else(not_found)?;
        // The parent of a bare name is the empty path, which is no directory to `is_dir`.
        let folder = match path.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => return Err(not_found()),
        };
        if !folder.is_dir() {
            return Err(not_found());
        }
        let maps = read_maps(folder, Some(prefix))?;
        if maps.is_empty() {
            return Err(not_found());
        }
        Ok(Self { folder: folder.to_owned(), prefix: Some(prefix.to_owned()), base: None, maps })
    }

    /// Opens one of the captures that are part of the project, by its name below `lab/captures`
    /// (`v1.21-tcx`, `v1.18-faults/01-backend-missing`).
    ///
    /// # Errors
    /// As [`Capture::open`].
    pub fn project(name: &str) -> Result<Self, CaptureError> {
        Self::open(project_captures().join(name))
    }

    /// The prefixes of the states in a faults folder, sorted; empty for any other folder.
    ///
    /// # Errors
    /// [`CaptureError::Read`] where the folder cannot be listed.
    pub fn states(folder: &Path) -> Result<Vec<String>, CaptureError> {
        let mut states: Vec<String> = list(folder)?
            .iter()
            .filter_map(|path| {
                let (stem, _) = map_file_stem(path)?;
                Some(stem.split_once('.')?.0.to_owned())
            })
            .collect();
        states.sort();
        states.dedup();
        Ok(states)
    }

    /// Lays this capture over another: maps (and text files) that this one lacks come from `base`.
    ///
    /// A faults folder holds only the maps that its faults touch. Its states were captured at
    /// another time than the full captures, so addresses of pods may differ between the two.
    #[must_use]
    pub fn over(mut self, base: Self) -> Self {
        for (name, map) in &base.maps {
            self.maps.entry(name.clone()).or_insert_with(|| map.clone());
        }
        self.base = Some(Box::new(base));
        self
    }

    /// Drops every map but those that `names` names.
    ///
    /// # Errors
    /// [`CaptureError::NoSuchMap`] for a name that the capture does not have.
    pub fn keep(&mut self, names: &[String]) -> Result<(), CaptureError> {
        if let Some(name) = names.iter().find(|name| !self.maps.contains_key(*name)) {
            return Err(CaptureError::NoSuchMap { capture: self.path(), name: name.clone() });
        }
        self.maps.retain(|name, _| names.contains(name));
        Ok(())
    }

    /// The folder, with the prefix of the state where there is one: what [`Capture::open`] takes.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        match &self.prefix {
            Some(prefix) => self.folder.join(prefix),
            None => self.folder.clone(),
        }
    }

    /// The maps, sorted by the name of their pin.
    pub fn maps(&self) -> impl Iterator<Item = &CapturedMap> {
        self.maps.values()
    }

    /// Every map, to be changed.
    pub(crate) fn maps_mut(&mut self) -> impl Iterator<Item = &mut CapturedMap> {
        self.maps.values_mut()
    }

    /// The map that was pinned as `name`.
    #[must_use]
    pub fn map(&self, name: &str) -> Option<&CapturedMap> {
        self.maps.get(name)
    }

    /// Whether the capture holds the text file `name` (see [`Capture::text`]).
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// A text file of the capture, by its path inside the folder and without `.gz`:
    /// `cilium/lb-list.txt`, `probes.json`. In one state of a faults folder `lb-list.txt` is the
    /// file `PREFIX.lb-list.txt`, and `outcomes.txt` the one that all states share.
    ///
    /// # Errors
    /// [`CaptureError::NoSuchFile`] where it is not there, [`CaptureError::Read`] and
    /// [`CaptureError::Gzip`] where it cannot be read.
    pub fn text(&self, name: &str) -> Result<String, CaptureError> {
        let path = self.find(name).ok_or_else(|| CaptureError::NoSuchFile {
            capture: self.path(),
            name: name.to_owned(),
        })?;
        String::from_utf8(read_maybe_gz(&path)?).map_err(|error| CaptureError::Read {
            path,
            source: io::Error::new(io::ErrorKind::InvalidData, error),
        })
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        let prefixed = self.prefix.as_ref().map(|prefix| format!("{prefix}.{name}"));
        prefixed
            .iter()
            .map(String::as_str)
            .chain([name])
            .flat_map(|name| [self.folder.join(name), self.folder.join(format!("{name}.gz"))])
            .find(|path| path.is_file())
            .or_else(|| self.base.as_ref()?.find(name))
    }
}

fn list(folder: &Path) -> Result<Vec<PathBuf>, CaptureError> {
    let error = |source| CaptureError::Read { path: folder.to_owned(), source };
    let mut paths = fs::read_dir(folder)
        .map_err(error)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(error)?;
    paths.sort();
    Ok(paths)
}

/// `NAME` of `NAME.hex` and `NAME.hex.gz`, and whether it is compressed.
fn map_file_stem(path: &Path) -> Option<(&str, bool)> {
    let name = path.file_name()?.to_str()?;
    match name.strip_suffix(".gz") {
        Some(plain) => Some((plain.strip_suffix(".hex")?, true)),
        None => Some((name.strip_suffix(".hex")?, false)),
    }
}

/// The maps of a folder: those named `PREFIX.NAME.hex`, or without a prefix those named `NAME.hex`.
fn read_maps(
    folder: &Path,
    prefix: Option<&str>,
) -> Result<BTreeMap<String, CapturedMap>, CaptureError> {
    let mut maps = BTreeMap::<String, CapturedMap>::new();
    let mut inner = Vec::new();
    for path in list(folder)? {
        let Some((stem, _)) = map_file_stem(&path) else { continue };
        let name = match prefix {
            Some(prefix) => {
                match stem.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.')) {
                    Some(name) => name,
                    None => continue,
                }
            }
            None => stem,
        };
        if let Some((outer, key)) = name.split_once(".inner-") {
            inner.push((outer.to_owned(), key.to_owned(), CapturedMap::read(&path, name)?));
            continue;
        }
        // Without a prefix, a name with a dot is one state of a faults folder. bpffs itself
        // refuses names with dots, so no map is lost by this.
        if name.contains('.') {
            continue;
        }
        if let Some(other) = maps.insert(name.to_owned(), CapturedMap::read(&path, name)?) {
            return Err(CaptureError::Twice { path: other.path });
        }
    }
    for (outer, key, map) in inner {
        let wrong = |problem: String| CaptureError::InnerName { path: map.path.clone(), problem };
        let key = decode_hex(&key, Part::Key, 1).map_err(|problem| wrong(problem.to_string()))?;
        let outer =
            maps.get_mut(&outer).ok_or_else(|| wrong(format!("there is no outer map {outer}")))?;
        if !outer.entries.iter().any(|entry| entry.key == key) {
            return Err(wrong(format!("{} has no entry {}", outer.name, encode_hex(&key))));
        }
        outer.inner.insert(key, map);
    }
    for map in maps.values().filter(|map| map.spec.is_map_in_map()) {
        if let Some(entry) = map.entries.iter().find(|entry| !map.inner.contains_key(&entry.key)) {
            return Err(CaptureError::NoInner {
                path: map.path.clone(),
                name: map.name.clone(),
                key: encode_hex(&entry.key),
            });
        }
    }
    Ok(maps)
}

/// The content of a file, decompressed if its name ends in `.gz`.
fn read_maybe_gz(path: &Path) -> Result<Vec<u8>, CaptureError> {
    let bytes =
        fs::read(path).map_err(|source| CaptureError::Read { path: path.to_owned(), source })?;
    if path.extension() != Some(OsStr::new("gz")) {
        return Ok(bytes);
    }
    let mut plain = Vec::new();
    MultiGzDecoder::new(bytes.as_slice())
        .read_to_end(&mut plain)
        .map_err(|source| CaptureError::Gzip { path: path.to_owned(), source })?;
    Ok(plain)
}

type LineError = (usize, LineProblem);

/// Parses the content of a `.hex` file. On error: the number of the line, from 1, and the problem.
///
/// # Errors
/// The first line that is wrong.
pub fn parse_map(bytes: &[u8]) -> Result<(MapSpec, Vec<Entry>), LineError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let good = bytes[..error.valid_up_to()].split(|byte| *byte == b'\n');
        (good.count(), LineProblem::NotText)
    })?;
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim_end()));
    let (_, header) = lines.next().unwrap_or((1, ""));
    let spec = parse_header(header).map_err(|problem| (1, problem))?;

    let mut entries = Vec::new();
    let mut seen = BTreeMap::<Vec<u8>, usize>::new();
    for (number, line) in lines {
        if let Some(comment) = line.strip_prefix('#') {
            if let Some(count) = comment.trim().strip_prefix("entries=") {
                let said = count.trim().parse().map_err(|_| {
                    (number, LineProblem::BadField { field: "entries", found: count.to_owned() })
                })?;
                // Program arrays were dumped without their entries, and so without the line.
                if said != entries.len() {
                    return Err((number, LineProblem::WrongCount { said, found: entries.len() }));
                }
            }
            continue;
        }
        if line.is_empty() {
            continue;
        }
        let entry = parse_entry(line, &spec).map_err(|problem| (number, problem))?;
        if let Some(first) = seen.insert(entry.key.clone(), number) {
            let key = encode_hex(&entry.key);
            return Err((number, LineProblem::DuplicateKey { key, first }));
        }
        entries.push(entry);
        if entries.len() > spec.max_entries as usize {
            let problem = LineProblem::TooMany { found: entries.len(), max: spec.max_entries };
            return Err((number, problem));
        }
    }
    Ok((spec, entries))
}

fn parse_header(line: &str) -> Result<MapSpec, LineProblem> {
    let no_header = || LineProblem::NoHeader { found: line.chars().take(60).collect() };
    let rest = line.strip_prefix('#').ok_or_else(no_header)?;
    let fields: BTreeMap<&str, &str> =
        rest.split_whitespace().filter_map(|field| field.split_once('=')).collect();
    if fields.is_empty() {
        return Err(no_header());
    }
    let text =
        |field: &'static str| fields.get(field).copied().ok_or(LineProblem::MissingField { field });
    let number = |field: &'static str| -> Result<u32, LineProblem> {
        let found = text(field)?;
        let parsed = match found.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16),
            None => found.parse(),
        };
        parsed.map_err(|_| LineProblem::BadField { field, found: found.to_owned() })
    };
    Ok(MapSpec {
        map_type: MapType(number("type")?),
        key_size: number("key")?,
        value_size: number("value")?,
        max_entries: number("max")?,
        flags: number("flags")?,
        name: text("name")?.to_owned(),
    })
}

fn parse_entry(line: &str, spec: &MapSpec) -> Result<Entry, LineProblem> {
    let (key_text, rest) = match line.split_once(' ') {
        Some((key, rest)) => (key, Some(rest)),
        None => (line, None),
    };
    let key = decode_hex(key_text, Part::Key, 1)?;
    if key.len() != spec.key_size as usize {
        return Err(LineProblem::WrongLength {
            part: Part::Key,
            found: key.len(),
            expected: spec.key_size as usize,
        });
    }
    let value = match rest.map(str::trim_start).filter(|rest| !rest.is_empty()) {
        None if spec.holds_objects() => Vec::new(),
        None => return Err(LineProblem::MissingValue),
        Some(rest) => {
            let (value, trailing) = rest.split_once(' ').unwrap_or((rest, ""));
            if !trailing.trim().is_empty() {
                return Err(LineProblem::Trailing { found: trailing.trim().to_owned() });
            }
            decode_hex(value, Part::Value, line.len() - rest.len() + 1)?
        }
    };
    if spec.holds_objects() {
        return Ok(Entry { key, value });
    }
    if spec.map_type.is_per_cpu() {
        let each = spec.user_value_size(1);
        if value.is_empty() || value.len() % each != 0 {
            return Err(LineProblem::WrongPerCpuLength { found: value.len(), each });
        }
    } else if value.len() != spec.value_size as usize {
        return Err(LineProblem::WrongLength {
            part: Part::Value,
            found: value.len(),
            expected: spec.value_size as usize,
        });
    }
    Ok(Entry { key, value })
}

/// `column` is where `text` starts in its line, from 1.
fn decode_hex(text: &str, part: Part, column: usize) -> Result<Vec<u8>, LineProblem> {
    if let Some((index, found)) = text.char_indices().find(|(_, c)| !c.is_ascii_hexdigit()) {
        return Err(LineProblem::NotHex { part, found, column: column + index });
    }
    if !text.len().is_multiple_of(2) {
        return Err(LineProblem::OddHex { part, digits: text.len() });
    }
    let nibble = |digit: u8| match digit {
        b'0'..=b'9' => digit - b'0',
        // Only hexadecimal digits are left; setting bit 5 makes letters lower case.
        _ => (digit | 0x20) - b'a' + 10,
    };
    Ok(text.as_bytes().chunks_exact(2).map(|pair| nibble(pair[0]) << 4 | nibble(pair[1])).collect())
}

/// Bytes as lower-case hexadecimal digits.
#[must_use]
pub fn encode_hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
