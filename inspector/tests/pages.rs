//! The decision record as a page, in a real browser: on a phone and on a desk, light and dark. What
//! overflows, what cannot be read, and what the page would load from elsewhere are measured there.
//!
//! The pictures are left in `target/tmp/pages`, to be looked at. Needs root, bpf(2), a cgroup2 mount,
//! TUN devices and Chromium (`cargo xtask setup` fetches it); fails without.

mod browser;
mod node;
mod run;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use browser::{Browser, Look, Scheme, brightness};
use inspector::evidence::file::Document;
use inspector_lab::{Capture, Ns, evidence::evidence, lab::exec_outside};
use node::Node;
use run::{inspect, run};
use serde_json::Value;
use tempfile::TempDir;

/// Width and height of what is looked with.
const PHONE: (u32, u32) = (360, 780);
const DESK: (u32, u32) = (1280, 900);

/// Measures a page: whether something is wider than it, and whether text can be told from its ground.
const MEASURE: &str = r#"(() => {
  const root = document.documentElement;
  const seen = (one) => { const box = one.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  const name = (one) => one.tagName.toLowerCase() + "." + (one.getAttribute("class") || "") + " " + one.textContent.trim().slice(0, 40);
  const all = [...document.body.querySelectorAll("*")].filter(seen);
  const scrolls = (one) => one.closest(".scroll");
  const wide = all.filter((one) => !scrolls(one) || one.matches(".scroll"))
    .filter((one) => { const box = one.getBoundingClientRect(); return box.right > root.clientWidth + 1 || box.left < -1; });
  const within = [...document.querySelectorAll(".scroll")].filter(seen).filter((one) => one.scrollWidth > one.clientWidth + 1);
  const rgb = (text) => { const found = text.match(/[\d.]+/g).map(Number); return found.length > 3 && found[3] === 0 ? null : found.slice(0, 3); };
  const light = (colour) => { const [r, g, b] = colour.map((c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (one) => { for (; one; one = one.parentElement) { const found = rgb(getComputedStyle(one).backgroundColor); if (found) return found; } return [255, 255, 255]; };
  const texts = all.filter((one) => !(one instanceof SVGElement) && [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()));
  const contrasts = texts.map((one) => { const [a, b] = [light(rgb(getComputedStyle(one).color)), light(ground(one))].sort((x, y) => y - x); return [(a + 0.05) / (b + 0.05), name(one)]; });
  contrasts.sort((a, b) => a[0] - b[0]);
  const small = texts.filter((one) => parseFloat(getComputedStyle(one).fontSize) < 11.5).map(name);
  const marks = [...document.querySelectorAll(".track .mark")].map((mark) => { const box = mark.getBoundingClientRect(), track = mark.parentElement.getBoundingClientRect(); return [box.left + box.width / 2 - track.left, track.width]; });
  return { width: root.clientWidth, scroll: root.scrollWidth, wide: wide.map(name), within: within.map(name), contrast: contrasts[0], texts: texts.length, small, marks, title: document.title };
})()"#;

/// Evidence of a node with real connections: served ones of a client in the LAN and of one behind the
/// VPN.
fn observed(folder: &Path) -> PathBuf {
    const VIP: &str = "192.168.2.20";
    let node = Node::new("v1.21-tcx");
    node.0.set_agent_alive().expect("a sign of life");
    let (file, ready) = (folder.join("observed.json"), folder.join("ready"));
    let spawn = || {
        let mut command = inspect(["vip", VIP, "--trace=60s", "--count", "2"]);
        command.arg("--ready-file").arg(&ready).arg("--save").arg(&file);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let command = exec_outside(node.0.record(), Ns::Node, &mut command).expect("the node");
        command.spawn().expect("the program runs")
    };
    let mut child = node.0.run_alone(None, spawn).expect("mounts of its own");
    let deadline = Instant::now() + Duration::from_secs(30);
    while !ready.exists() {
        assert!(Instant::now() < deadline, "not ready after 30 s");
        assert!(child.try_wait().expect("the program").is_none(), "it ended before it was ready");
        thread::sleep(Duration::from_millis(5));
    }
    for from in [Ns::Client, Ns::Vpn] {
        let outcome = node.connect(from, "tcp", VIP, 443);
        assert!(outcome.ok, "{outcome:?}");
    }
    let output = child.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    file
}

/// A page, in a file of its own.
fn page(folder: &Path, name: &str, arguments: &[&str]) -> PathBuf {
    let ran = run(&mut inspect([arguments, &["-o", "html"]].concat()));
    assert!(ran.code.is_some_and(|code| code < 2), "{ran:?}");
    assert_eq!(ran.err, "");
    let path = folder.join(format!("{name}.html"));
    fs::write(&path, ran.out).expect("a file");
    path
}

/// Where pictures are left.
fn pictures() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pages");
    fs::create_dir_all(&folder).expect("mkdir");
    folder
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().expect("a list").iter().map(|one| one.as_str().expect("text")).collect()
}

/// What every page has to be like, on every device.
fn is_good(look: &Look, file: &Path, (width, _): (u32, u32), scheme: Scheme) {
    let Look { layout, requests, complaints, png: _ } = look;
    let what = format!("{} {width} {}", file.display(), scheme.name());
    assert_eq!(layout["width"], width, "{what}");
    assert_eq!(layout["scroll"], width, "{what}: wider than the screen: {}", layout["wide"]);
    assert!(texts(&layout["wide"]).is_empty(), "{what}: {}", layout["wide"]);
    assert!(texts(&layout["small"]).is_empty(), "{what}: too small: {}", layout["small"]);
    if width == PHONE.0 {
        assert!(texts(&layout["within"]).is_empty(), "{what}: sideways: {}", layout["within"]);
    }
    let contrast = layout["contrast"][0].as_f64().expect("a number");
    assert!(contrast >= 4.5, "{what}: contrast of {}", layout["contrast"]);
    assert!(layout["texts"].as_u64().expect("a number") > 30, "{what}: hardly a text");
    assert_eq!(*requests, [format!("file://{}", file.display())], "{what}");
    assert!(complaints.is_empty(), "{what}: {complaints:?}");
    let pixels = look.pixels();
    assert_eq!(pixels.width, width as usize, "{what}");
    let (ground, share) = pixels.ground();
    let bright = brightness(ground);
    match scheme {
        Scheme::Light => assert!(bright > 200, "{what}: ground {ground:?}"),
        Scheme::Dark => assert!(bright < 60, "{what}: ground {ground:?}"),
    }
    // Text is there, and does not fill it.
    assert!((0.3..0.97).contains(&share), "{what}: {share:.3} of it is {ground:?}");
    assert!(pixels.colours.len() > 50, "{what}: {} colours", pixels.colours.len());
}

#[test]
fn pages_are_readable_on_every_device_and_load_nothing() {
    let folder = TempDir::new().expect("a folder");
    let trace = observed(folder.path());
    let capture = Capture::project("v1.18-wg0-detached").expect("a capture");
    let partly = evidence(&capture, "192.168.2.20".parse().expect("a VIP")).expect("evidence");
    let detached = folder.path().join("detached.json");
    Document::new(partly).write(&detached).expect("a file");
    let path = |file: &Path| file.to_str().expect("UTF-8").to_owned();
    let (trace, detached) = (path(&trace), path(&detached));
    let claims = ["--expect", "served", "--expect", "no-finding:device-no-datapath"];
    let pages = [
        page(folder.path(), "observed", &["vip", "192.168.2.20", "--from", &trace]),
        page(
            folder.path(),
            "partly",
            &[&["vip", "192.168.2.20", "--from", &detached], &claims[..]].concat(),
        ),
        page(
            folder.path(),
            "cluster",
            &[&["evidence", "merge", &trace, &detached], &claims[..]].concat(),
        ),
    ];
    let mut browser = Browser::start();
    for file in &pages {
        let name = file.file_stem().expect("a name").to_str().expect("UTF-8");
        for size in [PHONE, DESK] {
            let looks = [Scheme::Light, Scheme::Dark].map(|scheme| {
                let look = browser.look(file, size, scheme, MEASURE);
                let picture = format!("{name}-{}-{}.png", size.0, scheme.name());
                fs::write(pictures().join(picture), &look.png).expect("a picture");
                is_good(&look, file, size, scheme);
                look
            });
            assert_ne!(looks[0].png, looks[1].png, "{name}: light and dark are the same");
            // The same words in both.
            assert_eq!(looks[0].layout["texts"], looks[1].layout["texts"], "{name}");
            if name == "observed" {
                timeline(&looks[0].layout["marks"], size);
            }
        }
    }
}

/// The hooks of two journeys stand on their axes, in the order of time and not on one place.
fn timeline(marks: &Value, size: (u32, u32)) {
    let places: Vec<(f64, f64)> = marks
        .as_array()
        .expect("marks")
        .iter()
        .map(|one| (one[0].as_f64().expect("a place"), one[1].as_f64().expect("a width")))
        .collect();
    assert!(places.len() > 10, "{size:?}: {} hooks", places.len());
    assert!(places.iter().all(|(at, width)| (-0.5..=width + 0.5).contains(at)), "{places:?}");
    let first = places.iter().filter(|(at, _)| at.abs() < 0.5).count();
    assert!((2..=places.len() / 2).contains(&first), "two arrivals at zero: {places:?}");
    let mut falls = 0;
    for pair in places.windows(2) {
        falls += usize::from(pair[1].0 < pair[0].0);
    }
    assert_eq!(falls, 1, "time runs on, and begins anew with the second journey: {places:?}");
    let furthest = places.iter().map(|(at, width)| at / width).fold(0.0, f64::max);
    assert!(furthest > 0.95, "the axis ends with the last hook: {furthest}");
}

/// The controls: a page with each of these faults is found out.
#[test]
fn what_is_measured_is_measured() {
    let folder = TempDir::new().expect("a folder");
    let capture = Capture::project("v1.21-tcx").expect("a capture");
    let evidence = evidence(&capture, "192.168.2.22".parse().expect("a VIP")).expect("evidence");
    let file = folder.path().join("evidence.json");
    Document::new(evidence).write(&file).expect("a file");
    let from = file.to_str().expect("UTF-8");
    let good = page(folder.path(), "good", &["vip", "192.168.2.22", "--from", from]);
    let text = fs::read_to_string(&good).expect("a page");
    let mut browser = Browser::start();
    let mut with = |name: &str, from: &str, to: &str| -> (PathBuf, Look) {
        assert!(text.contains(from), "no {from} in the page");
        let file = folder.path().join(format!("{name}.html"));
        fs::write(&file, text.replacen(from, to, 1)).expect("a file");
        let look = browser.look(&file, PHONE, Scheme::Light, MEASURE);
        (file, look)
    };
    let end = "</body>";
    let (file, look) = with("same", end, end);
    is_good(&look, &file, PHONE, Scheme::Light);

    let (_, look) = with("wide", end, "<p style=\"width:500px\">wide</p></body>");
    assert_eq!(texts(&look.layout["wide"]), ["p. wide"]);
    assert!(look.layout["scroll"].as_u64() > Some(u64::from(PHONE.0)), "{}", look.layout["scroll"]);
    let (_, look) = with("pale", end, "<p style=\"color:#ccc\">pale</p></body>");
    assert!(look.layout["contrast"][0].as_f64() < Some(2.0), "{}", look.layout["contrast"]);
    let (_, look) = with("small", end, "<p style=\"font-size:8px\">small</p></body>");
    assert_eq!(texts(&look.layout["small"]), ["p. small"]);
    // What would be loaded is asked for where the page allows it, and where it does not, is refused.
    let image = "<img src=\"http://192.0.2.1/a.png\" alt=\"\"/></body>";
    let (_, look) = with("image", end, image);
    assert!(look.complaints.iter().any(|one| one.contains("img-src")), "{:?}", look.complaints);
    let start = text.find("<meta http-equiv").expect("the policy");
    let policy = &text[start..=start + text[start..].find("/>").expect("its end") + 1];
    let open = text.replacen(policy, "", 1).replacen(end, image, 1);
    let file = folder.path().join("open.html");
    fs::write(&file, open).expect("a file");
    let look = browser.look(&file, PHONE, Scheme::Light, MEASURE);
    assert!(look.requests.iter().any(|one| one == "http://192.0.2.1/a.png"), "{:?}", look.requests);
    // And nothing runs.
    let file = folder.path().join("script.html");
    let script = "<script>document.title = 'ran'</script></body>";
    fs::write(&file, text.replacen(end, script, 1)).expect("a file");
    let look = browser.look(&file, PHONE, Scheme::Light, MEASURE);
    assert_ne!(look.layout["title"], "ran");
    let text = fs::read_to_string(&file).expect("a page").replacen(policy, "", 1);
    fs::write(&file, text).expect("a file");
    let look = browser.look(&file, PHONE, Scheme::Light, MEASURE);
    assert_eq!(look.layout["title"], "ran");
    // A page without a style has one colour scheme, and is dark for nobody.
    let bare = folder.path().join("bare.html");
    fs::write(&bare, "<!DOCTYPE html><html><body>bare</body></html>").expect("a file");
    let look = browser.look(&bare, DESK, Scheme::Dark, MEASURE);
    assert!(brightness(look.pixels().ground().0) > 200);
}
