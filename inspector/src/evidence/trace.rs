//! What was observed of real packets, and how well it could be seen.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::trace::{
    journey::{Counts, Journey, Question},
    sighting::{Hook, Tier},
};

/// Real packets, as they were observed for a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Trace {
    /// What was watched, and how well.
    pub watched: Watched,
    /// When observation ended, nanoseconds of `CLOCK_MONOTONIC`.
    pub ended_ns: u64,
    /// What ended it.
    pub stopped: Stopped,
    /// Connections, in the order in which they came to an end.
    pub journeys: Vec<Journey>,
    /// Further connections that went like one of these and are not kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more: Vec<More>,
    /// Connections that went like none of these and are not kept either.
    #[serde(default)]
    pub not_kept: u64,
    /// How the VIP was asked for on the wire, by device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub questions: Vec<Question>,
    /// The answer counters of the VIP's L2 responder entries, before and after.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub answers: Vec<AnswerCount>,
}

/// Connections that are counted and not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct More {
    /// Index of the journey that they went like.
    pub like: usize,
    /// How many.
    pub times: u64,
}

/// The answer counter of an L2 responder entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AnswerCount {
    /// Index of the device.
    pub ifindex: u32,
    /// Answers before observation began.
    pub before: u64,
    /// Answers when it had ended.
    pub after: u64,
}

/// What ended the observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Stopped {
    /// The time that was asked for was over.
    Duration,
    /// As many journeys as were asked for had come to an end.
    Count,
    /// The user.
    Interrupt,
    /// The command that made the traffic ended.
    Command,
}

/// What was watched, and how well.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Watched {
    /// Since when, nanoseconds of `CLOCK_MONOTONIC`: every hook was live then.
    pub started_ns: u64,
    /// Kinds of observers, with what each could not do.
    pub tiers: Vec<TierUse>,
    /// What the hooks counted; those at which nothing matched are left out.
    pub counts: Vec<HookCount>,
    /// What became of the sightings.
    pub joined: Counts,
}

/// One kind of observers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TierUse {
    /// Which.
    pub tier: Tier,
    /// The hooks that were watched.
    pub hooks: Vec<WatchedHook>,
    /// What was attached, in words: `eno1 ingress (tcx)`, `neigh_create`, ….
    #[serde(default)]
    pub attached: Vec<String>,
    /// What could not be attached, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<(String, String)>,
    /// Why nothing of the tier was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A hook that was watched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WatchedHook {
    /// Which.
    pub hook: Hook,
    /// At which devices; nothing for every device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ifindexes: Option<Vec<u32>>,
}

/// What one hook counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HookCount {
    /// The kind of observer.
    pub tier: Tier,
    /// The hook.
    pub hook: Hook,
    /// What matched, lost ones included.
    pub matched: u64,
    /// What matched and was lost.
    pub lost: u64,
}

impl Watched {
    /// How many sightings of a hook were lost.
    #[must_use]
    pub fn lost(&self, hook: Hook) -> u64 {
        self.counts.iter().filter(|count| count.hook == hook).map(|count| count.lost).sum()
    }

    /// How many sightings were lost in all.
    #[must_use]
    pub fn lost_in_all(&self) -> u64 {
        self.counts.iter().map(|count| count.lost).sum()
    }

    /// Whether a hook was watched at all.
    #[must_use]
    pub fn watches(&self, hook: Hook) -> bool {
        self.tiers.iter().any(|tier| tier.hooks.iter().any(|one| one.hook == hook))
    }

    /// Whether everything that passed a hook of a device was seen.
    #[must_use]
    pub fn saw_all(&self, hook: Hook, ifindex: u32) -> bool {
        self.tiers.iter().any(|tier| {
            let watched = tier.hooks.iter().any(|one| {
                one.hook == hook
                    && one.ifindexes.as_ref().is_none_or(|indexes| indexes.contains(&ifindex))
            });
            watched && self.complete(tier.tier, hook)
        })
    }

    /// Whether everything that passed a hook was seen, on every device.
    #[must_use]
    pub fn saw_all_everywhere(&self, hook: Hook) -> bool {
        self.tiers.iter().any(|tier| {
            let watched = tier.hooks.iter().any(|one| one.hook == hook && one.ifindexes.is_none());
            watched && self.complete(tier.tier, hook)
        })
    }

    fn complete(&self, tier: Tier, hook: Hook) -> bool {
        !self.counts.iter().any(|one| (one.tier, one.hook) == (tier, hook) && one.lost > 0)
    }
}
