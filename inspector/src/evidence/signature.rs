//! A detached signature beside an evidence file, in the format of minisign: made with a secret key
//! file, checked with a public one, by this program or by `minisign`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use minisign::{PublicKey, PublicKeyBox, SecretKeyBox, SignatureBox};

use super::file::Document;

/// Why something could not be signed, or a signature is not good.
#[derive(Debug, thiserror::Error)]
pub enum SignatureError {
    /// A file could not be read or written.
    #[error("cannot {what} {path}: {source}")]
    File {
        /// What was to be done.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The key is none, or its password is wrong.
    #[error("{path} is no usable {kind} key of minisign: {reason}")]
    Key {
        /// `secret` or `public`.
        kind: &'static str,
        /// Path of the file, or the key itself.
        path: String,
        /// Why.
        reason: String,
    },
    /// The signature could not be made.
    #[error("cannot sign {path}: {reason}")]
    Sign {
        /// Path of the file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The signature is not that of this key on this file.
    #[error("{path} is not signed by this key: {reason}")]
    Bad {
        /// Path of the file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// Where the signature of a file stands: its name with `.minisig` behind it.
#[must_use]
pub fn path_of(file: &Path) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(".minisig");
    path.into()
}

fn read(path: &Path) -> Result<String, SignatureError> {
    fs::read_to_string(path).map_err(|source| SignatureError::File {
        what: "read",
        path: path.to_owned(),
        source,
    })
}

/// Signs a file: its signature is written beside it. The trusted comment, which the signature
/// covers, names the evidence's SHA-256 and when it was collected. The password of an encrypted key
/// is asked for at the terminal.
///
/// # Errors
/// [`SignatureError`].
pub fn sign(file: &Path, document: &Document, key: &Path) -> Result<PathBuf, SignatureError> {
    let bad_key = |reason: String| SignatureError::Key {
        kind: "secret",
        path: key.display().to_string(),
        reason,
    };
    let text = read(key)?;
    let boxed = || SecretKeyBox::from_string(&text).map_err(|error| bad_key(error.to_string()));
    let secret = match boxed()?.into_unencrypted_secret_key() {
        Ok(secret) => secret,
        Err(_) => boxed()?.into_secret_key(None).map_err(|error| bad_key(error.to_string()))?,
    };
    let content = fs::read(file).map_err(|source| SignatureError::File {
        what: "read",
        path: file.to_owned(),
        source,
    })?;
    let trusted =
        format!("evidence sha256:{} collected:{}", document.sha256, document.evidence.time.ended);
    let signature =
        minisign::sign(None, &secret, content.as_slice(), Some(&trusted), None).map_err(
            |error| SignatureError::Sign { path: file.to_owned(), reason: error.to_string() },
        )?;
    let path = path_of(file);
    fs::write(&path, signature.into_string()).map_err(|source| SignatureError::File {
        what: "write",
        path: path.clone(),
        source,
    })?;
    Ok(path)
}

/// Checks the signature beside a file; the key is a file of minisign's, or the key itself in
/// base64. Returns the trusted comment.
///
/// # Errors
/// [`SignatureError::Bad`] for a signature that is not good, others where it could not be checked.
pub fn verify(file: &Path, key: &str) -> Result<String, SignatureError> {
    let bad_key =
        |reason: String| SignatureError::Key { kind: "public", path: key.to_owned(), reason };
    let public = if Path::new(key).exists() {
        PublicKeyBox::from_string(&read(Path::new(key))?)
            .and_then(PublicKeyBox::into_public_key)
            .map_err(|error| bad_key(error.to_string()))?
    } else {
        PublicKey::from_base64(key).map_err(|error| bad_key(error.to_string()))?
    };
    let bad = |reason: String| SignatureError::Bad { path: file.to_owned(), reason };
    let signature = SignatureBox::from_string(&read(&path_of(file))?)
        .map_err(|error| bad(error.to_string()))?;
    let content = fs::File::open(file).map_err(|source| SignatureError::File {
        what: "read",
        path: file.to_owned(),
        source,
    })?;
    minisign::verify(&public, &signature, content, true, false, false)
        .map_err(|error| bad(error.to_string()))?;
    signature.trusted_comment().map_err(|error| bad(error.to_string()))
}
