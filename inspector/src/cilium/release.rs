//! Which Cilium release wrote the maps, and what differs between releases.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A Cilium release, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Release {
    /// 1.10
    #[serde(rename = "1.10")]
    V1_10,
    /// 1.11
    #[serde(rename = "1.11")]
    V1_11,
    /// 1.12
    #[serde(rename = "1.12")]
    V1_12,
    /// 1.13
    #[serde(rename = "1.13")]
    V1_13,
    /// 1.13.90: development after 1.13, with the backend maps of 1.14 but without its run-time
    /// configuration.
    #[serde(rename = "1.13.90")]
    V1_13_90,
    /// 1.14
    #[serde(rename = "1.14")]
    V1_14,
    /// 1.15
    #[serde(rename = "1.15")]
    V1_15,
    /// 1.16
    #[serde(rename = "1.16")]
    V1_16,
    /// 1.17
    #[serde(rename = "1.17")]
    V1_17,
    /// 1.18
    #[serde(rename = "1.18")]
    V1_18,
    /// 1.19
    #[serde(rename = "1.19")]
    V1_19,
    /// 1.20
    #[serde(rename = "1.20")]
    V1_20,
    /// 1.21
    #[serde(rename = "1.21")]
    V1_21,
}

impl Release {
    /// Every release, oldest first.
    pub const ALL: [Self; 13] = [
        Self::V1_10,
        Self::V1_11,
        Self::V1_12,
        Self::V1_13,
        Self::V1_13_90,
        Self::V1_14,
        Self::V1_15,
        Self::V1_16,
        Self::V1_17,
        Self::V1_18,
        Self::V1_19,
        Self::V1_20,
        Self::V1_21,
    ];

    /// The version as text: `1.18`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1_10 => "1.10",
            Self::V1_11 => "1.11",
            Self::V1_12 => "1.12",
            Self::V1_13 => "1.13",
            Self::V1_13_90 => "1.13.90",
            Self::V1_14 => "1.14",
            Self::V1_15 => "1.15",
            Self::V1_16 => "1.16",
            Self::V1_17 => "1.17",
            Self::V1_18 => "1.18",
            Self::V1_19 => "1.19",
            Self::V1_20 => "1.20",
            Self::V1_21 => "1.21",
        }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
