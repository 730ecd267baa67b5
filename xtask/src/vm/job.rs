//! One command that a machine runs, with everything that it finds around it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// A command, where it runs and its whole environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// The program and its arguments.
    pub words: Vec<OsString>,
    folder: OsString,
    environment: Vec<(OsString, OsString)>,
}

impl Job {
    /// A command as it would run here and now.
    pub fn here(words: Vec<OsString>) -> Result<Self> {
        let folder = env::current_dir().context("the current folder is not there")?;
        let environment = env::vars_os().collect();
        Ok(Self { words, folder: folder.into_os_string(), environment })
    }

    /// The program by its file name, without the hash that cargo puts behind it.
    pub fn name(&self) -> String {
        let program = self.words.first().map(Path::new).and_then(Path::file_name);
        let name = program.unwrap_or_default().to_string_lossy();
        match name.rsplit_once('-') {
            Some((name, hash)) if hash.len() == 16 => name.to_owned(),
            _ => name.into_owned(),
        }
    }

    /// Names of the tests that a test program would run, which it is asked here.
    pub fn tests(&self) -> Result<Vec<String>> {
        let all = self.listed(&[])?;
        if self.words.iter().any(|word| word == "--ignored" || word == "--include-ignored") {
            return Ok(all);
        }
        let ignored = self.listed(&["--ignored"])?;
        Ok(all.into_iter().filter(|name| !ignored.contains(name)).collect())
    }

    fn listed(&self, more: &[&str]) -> Result<Vec<String>> {
        let (program, arguments) = self.words.split_first().context("no program")?;
        let mut command = Command::new(program);
        command.args(arguments).args(["--list", "--format", "terse"]).args(more);
        command.current_dir(&self.folder).env_clear().envs(self.environment.iter().cloned());
        let out = command.output().with_context(|| format!("cannot start {}", self.name()))?;
        if !out.status.success() {
            bail!(
                "{} cannot list its tests ({}): {}",
                self.name(),
                out.status,
                String::from_utf8_lossy(&out.stderr).trim()
            );
        }
        let text = String::from_utf8_lossy(&out.stdout);
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    /// The shell script that becomes the command.
    pub fn script(&self) -> Vec<u8> {
        let mut script = b"cd ".to_vec();
        script.extend(quoted(self.folder.as_bytes()));
        // By its path: by its name it would be busybox's, which takes its own programs first.
        script.extend(b" || exit 126\nexec /usr/bin/env -i");
        for (name, value) in &self.environment {
            let mut pair = name.as_bytes().to_vec();
            pair.push(b'=');
            pair.extend(value.as_bytes());
            script.push(b' ');
            script.extend(quoted(&pair));
        }
        for word in &self.words {
            script.push(b' ');
            script.extend(quoted(word.as_bytes()));
        }
        script.push(b'\n');
        script
    }

    /// Appends it to a file of jobs.
    pub fn write_to(&self, path: &Path) -> Result<()> {
        let numbers: [OsString; 2] =
            [self.words.len(), self.environment.len()].map(|number| number.to_string().into());
        let pairs = self.environment.iter().flat_map(|(name, value)| [name, value]);
        let fields = numbers.iter().chain([&self.folder]).chain(&self.words).chain(pairs);
        let mut bytes = Vec::new();
        for field in fields {
            // No argument, path or variable contains the byte 0.
            bytes.extend(field.as_bytes());
            bytes.push(0);
        }
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .and_then(|mut file| file.write_all(&bytes))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// The jobs in a file, in the order in which they were written.
    pub fn read_all(path: &Path) -> Result<Vec<Self>> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut fields =
            bytes.split_inclusive(|byte| *byte == 0).map(|field| &field[..field.len() - 1]);
        let mut jobs = Vec::new();
        while let Some(first) = fields.next() {
            let mut field = || Some(OsString::from_vec(fields.next()?.to_vec()));
            let job = (|| {
                let number = |text: &OsStr| text.to_str()?.parse::<usize>().ok();
                let words = number(OsStr::from_bytes(first))?;
                let variables = number(&field()?)?;
                let folder = field()?;
                let words = (0..words).map(|_| field()).collect::<Option<_>>()?;
                let environment =
                    (0..variables).map(|_| Some((field()?, field()?))).collect::<Option<_>>()?;
                Some(Self { words, folder, environment })
            })();
            jobs.push(job.with_context(|| format!("{} is damaged", path.display()))?);
        }
        Ok(jobs)
    }
}

/// A word for the shell, as it is.
pub fn quoted(word: &[u8]) -> Vec<u8> {
    let mut text = vec![b'\''];
    for byte in word {
        match byte {
            b'\'' => text.extend(br"'\''"),
            byte => text.push(*byte),
        }
    }
    text.push(b'\'');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(words: &[&str]) -> Job {
        Job {
            words: words.iter().map(OsString::from).collect(),
            folder: "/a b".into(),
            environment: vec![("A".into(), "it's\n$x".into()), ("EMPTY".into(), "".into())],
        }
    }

    #[test]
    fn jobs_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("jobs");
        let jobs = [job(&["/bin/x", "", "--exact"]), job(&["y"])];
        for job in &jobs {
            job.write_to(&path).expect("written");
        }
        assert_eq!(Job::read_all(&path).expect("read"), jobs);
        let bytes = fs::read(&path).expect("bytes");
        fs::write(&path, &bytes[..bytes.len() - 3]).expect("shorter");
        Job::read_all(&path).expect_err("damaged");
    }

    #[test]
    fn shell_runs_what_was_meant() {
        let mut job =
            job(&["/bin/sh", "-c", "printf '%s|' \"$A\" \"$EMPTY\" \"$@\"", "me", "it's"]);
        job.folder = "/".into();
        let mut shell = std::process::Command::new("sh");
        let out = shell.arg("-c").arg(OsString::from_vec(job.script())).output().expect("a shell");
        assert_eq!(String::from_utf8_lossy(&out.stdout), "it's\n$x||it's|");
    }
}
