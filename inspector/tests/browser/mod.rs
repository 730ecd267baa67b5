//! A real browser without a window, in a network namespace without a network: it loads a page as a
//! device of some width would, and says how it was laid out, what it wanted to load and how it looks.
//!
//! It is Chromium, spoken to in its `DevTools` protocol over a pair of pipes (file descriptors 3 and 4,
//! messages end in a zero byte).

#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    collections::BTreeMap,
    env, fs,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Light or dark, as the reader's device has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    Light,
    Dark,
}

impl Scheme {
    pub fn name(self) -> &'static str {
        match self {
            Self::Light => "light",
            Self::Dark => "dark",
        }
    }
}

/// How a page looks.
#[derive(Debug)]
pub struct Look {
    /// What the script measured.
    pub layout: Value,
    /// Every address that the page made the browser ask for, its own included.
    pub requests: Vec<String>,
    /// What the browser complained of: what the page may not load or run, errors.
    pub complaints: Vec<String>,
    /// All of the page, as a PNG file.
    pub png: Vec<u8>,
}

/// The picture's pixels.
pub struct Pixels {
    pub width: usize,
    pub height: usize,
    /// How often each colour is there, among every seventh pixel: red, green, blue.
    pub colours: BTreeMap<[u8; 3], usize>,
}

impl Pixels {
    /// The colour that is there most, and its share.
    pub fn ground(&self) -> ([u8; 3], f64) {
        let (colour, count) = self.colours.iter().max_by_key(|(_, count)| **count).expect("pixels");
        #[allow(clippy::cast_precision_loss, reason = "pixels of a page")]
        let share = *count as f64 / self.colours.values().sum::<usize>() as f64;
        (*colour, share)
    }
}

/// How bright a colour is, from 0 to 255.
pub fn brightness(colour: [u8; 3]) -> u32 {
    let [red, green, blue] = colour.map(u32::from);
    (299 * red + 587 * green + 114 * blue) / 1000
}

impl Look {
    pub fn pixels(&self) -> Pixels {
        let decoder = png::Decoder::new(std::io::Cursor::new(&self.png));
        let mut reader = decoder.read_info().expect("a PNG");
        let mut buffer = vec![0; reader.output_buffer_size().expect("a size")];
        let info = reader.next_frame(&mut buffer).expect("a picture");
        let step = info.color_type.samples();
        assert!(info.bit_depth == png::BitDepth::Eight && step >= 3, "{info:?}");
        let mut colours = BTreeMap::new();
        for pixel in buffer[..info.buffer_size()].chunks_exact(step).step_by(7) {
            *colours.entry([pixel[0], pixel[1], pixel[2]]).or_default() += 1;
        }
        Pixels { width: info.width as usize, height: info.height as usize, colours }
    }
}

/// The program, and the folder into which set-up unpacked it, if it did.
fn program() -> (PathBuf, Option<PathBuf>) {
    let path = env::var_os("PATH").unwrap_or_default();
    let of_system = ["chromium", "chromium-headless-shell"];
    let mut all =
        env::split_paths(&path).flat_map(|folder| of_system.map(|name| folder.join(name)));
    if let Some(program) = all.find(|program| program.is_file()) {
        return (program, None);
    }
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    let tools = set("INSPECTOR_TOOLS").or_else(|| cache.map(|cache| cache.join("inspector-tools")));
    let root = tools.map(|tools| tools.join("browser")).unwrap_or_default();
    let program = root.join("usr/lib/chromium/chromium-headless-shell");
    assert!(
        program.is_file(),
        "no browser: run `cargo xtask setup`, or install the package chromium"
    );
    (program, Some(root))
}

/// Fonts and libraries of an unpacked browser.
fn with_root(command: &mut Command, root: &Path, folder: &Path) {
    let of_machine = format!("{}-linux-gnu", env::consts::ARCH);
    // Debian's libpulse looks for its other half at an absolute path.
    let libraries = ["usr/lib", "lib"].map(|part| root.join(part).join(&of_machine));
    let libraries = [&libraries[0], &libraries[1], &libraries[0].join("pulseaudio")];
    command.env("LD_LIBRARY_PATH", env::join_paths(libraries).expect("paths"));
    let fonts = folder.join("fonts.conf");
    let text = format!(
        "<?xml version=\"1.0\"?><!DOCTYPE fontconfig SYSTEM \"fonts.dtd\"><fontconfig><dir>{}</dir>\
         <cachedir>{}</cachedir></fontconfig>",
        root.join("usr/share/fonts").display(),
        folder.join("fonts").display()
    );
    fs::write(&fonts, text).expect("a file");
    command.env("FONTCONFIG_FILE", fonts);
}

/// A browser, which ends with this value.
pub struct Browser {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    last: u64,
    /// Messages that nobody has asked for, in their order.
    events: Vec<Value>,
    folder: TempDir,
}

impl Browser {
    pub fn start() -> Self {
        let folder = TempDir::new().expect("a folder");
        let (program, root) = program();
        let log = fs::File::create(folder.path().join("log")).expect("a file");
        // The shell moves its pipes to where the browser expects them.
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >&2"]).arg(program).args([
            "--headless",
            "--remote-debugging-pipe",
            // As root it has none.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
        ]);
        command.arg(format!("--user-data-dir={}", folder.path().join("profile").display()));
        command.env("HOME", folder.path());
        if let Some(root) = root {
            with_root(&mut command, &root, folder.path());
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).process_group(0);
        let alone = || Ok(unshare(CloneFlags::CLONE_NEWNET)?);
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe { command.pre_exec(alone) };
        let mut child = command.spawn().expect("sh (this test needs root)");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, input, output, last: 0, events: Vec::new(), folder }
    }

    fn read(&mut self) -> Value {
        let mut message = Vec::new();
        self.output.read_until(0, &mut message).expect("the browser");
        if message.pop().is_none() {
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            panic!("the browser ended: {log}");
        }
        serde_json::from_slice(&message).expect("JSON")
    }

    /// Calls a method and waits for what it returns.
    fn call(&mut self, session: Option<&str>, method: &str, params: &Value) -> Value {
        self.last += 1;
        let id = self.last;
        let mut message = json!({ "id": id, "method": method, "params": params });
        if let Some(session) = session {
            message["sessionId"] = session.into();
        }
        let mut text = message.to_string().into_bytes();
        text.push(0);
        self.input.write_all(&text).expect("the browser reads");
        loop {
            let message = self.read();
            if message["id"] == id {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            self.events.push(message);
        }
    }

    /// Waits for an event.
    fn wait(&mut self, method: &str) {
        while !self.events.iter().any(|event| event["method"] == method) {
            let message = self.read();
            self.events.push(message);
        }
    }

    /// Opens a file as a device of this size would, evaluates `script` in it and takes a picture.
    pub fn look(&mut self, file: &Path, size: (u32, u32), scheme: Scheme, script: &str) -> Look {
        self.events.clear();
        let target = self.call(None, "Target.createTarget", &json!({ "url": "about:blank" }));
        let target = target["targetId"].clone();
        let attach = json!({ "targetId": target, "flatten": true });
        let session = self.call(None, "Target.attachToTarget", &attach);
        let session = session["sessionId"].as_str().expect("a session").to_owned();
        let session = Some(session.as_str());
        for domain in ["Page", "Network", "Log", "Runtime"] {
            self.call(session, &format!("{domain}.enable"), &json!({}));
        }
        let (width, height) = size;
        let metrics = json!({
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": width < 600,
        });
        self.call(session, "Emulation.setDeviceMetricsOverride", &metrics);
        let feature = json!([{ "name": "prefers-color-scheme", "value": scheme.name() }]);
        self.call(session, "Emulation.setEmulatedMedia", &json!({ "features": feature }));
        let url = format!("file://{}", file.display());
        let loaded = self.call(session, "Page.navigate", &json!({ "url": url }));
        assert!(loaded["errorText"].is_null(), "{loaded}");
        self.wait("Page.loadEventFired");
        let measured = json!({ "expression": script, "returnByValue": true });
        let measured = self.call(session, "Runtime.evaluate", &measured);
        assert!(measured["exceptionDetails"].is_null(), "{measured}");
        let shot = json!({ "format": "png", "captureBeyondViewport": true });
        let shot = self.call(session, "Page.captureScreenshot", &shot);
        self.call(None, "Target.closeTarget", &json!({ "targetId": target }));
        let events = std::mem::take(&mut self.events);
        let of = |method: &str, pointer: &str| -> Vec<String> {
            events
                .iter()
                .filter(|event| event["method"] == method)
                .map(|event| event["params"].pointer(pointer).unwrap_or(&event["params"]).clone())
                .map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
                .collect()
        };
        Look {
            layout: measured["result"]["value"].clone(),
            requests: of("Network.requestWillBeSent", "/request/url"),
            complaints: [
                of("Log.entryAdded", "/entry/text"),
                of("Runtime.exceptionThrown", "/exceptionDetails/text"),
            ]
            .concat(),
            png: base64(shot["data"].as_str().expect("a picture")),
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its helpers too: the group is its own.
        let group = libc::pid_t::try_from(self.child.id()).expect("a process id");
        // SAFETY: numbers alone; the child has not been waited for, so that the group is ours.
        unsafe { libc::kill(-group, libc::SIGKILL) };
        drop(self.child.wait());
    }
}

/// Reads base64 as the protocol writes it.
fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut held, mut bits) = (0_u32, 0);
    for digit in text.bytes().take_while(|digit| *digit != b'=') {
        let value = DIGITS.iter().position(|one| *one == digit).expect("a digit of base64");
        held = held << 6 | u32::try_from(value).expect("six bits");
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from(held >> bits & 0xff).expect("a byte"));
        }
    }
    bytes
}
