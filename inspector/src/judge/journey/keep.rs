//! Which journeys are kept: some of each kind, and the number of the others.

use foldhash::HashMap;

use super::{Conclusion, SeenPath, VipLookups};
use crate::evidence::trace::More;
use crate::judge::{Outcome, Served};
use crate::trace::journey::Journey;

/// How many journeys of a kind are kept.
const OF_A_KIND: u64 = 32;
/// How many kinds are told apart.
const KINDS: usize = 256;

/// What makes two journeys one kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Kind {
    frontend: String,
    path: SeenPath,
    outcome: Outcome,
    served: Served,
    answer: std::mem::Discriminant<super::Answer>,
    translated: Option<bool>,
    backend: Option<String>,
    looked_up: std::mem::Discriminant<VipLookups>,
}

/// Keeps some journeys of each kind, and counts the others.
#[derive(Debug, Default)]
pub struct Keeper {
    /// Number of journeys of each kind, and the index of the first.
    kinds: HashMap<Kind, (u64, usize)>,
    journeys: Vec<Journey>,
    not_kept: u64,
}

impl Keeper {
    /// Takes a journey and what it proves.
    pub fn add(&mut self, journey: Journey, conclusion: &Conclusion) {
        let kind = Kind {
            frontend: conclusion.frontend.clone(),
            path: conclusion.path.clone(),
            outcome: conclusion.outcome,
            served: conclusion.served,
            answer: std::mem::discriminant(&conclusion.answer),
            translated: conclusion.translation.as_ref().map(|one| one.seen),
            backend: conclusion.translation.as_ref().map(|one| one.backend.clone()),
            looked_up: std::mem::discriminant(&conclusion.vip_lookups),
        };
        let kinds = self.kinds.len();
        let index = self.journeys.len();
        match self.kinds.get_mut(&kind) {
            Some((times, _)) => {
                *times += 1;
                if *times <= OF_A_KIND {
                    self.journeys.push(journey);
                }
            }
            None if kinds < KINDS => {
                self.kinds.insert(kind, (1, index));
                self.journeys.push(journey);
            }
            None => self.not_kept += 1,
        }
    }

    /// How many journeys were taken.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.not_kept + self.kinds.values().map(|(times, _)| times).sum::<u64>()
    }

    /// Whether none was.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The journeys that are kept, what further ones went like, and the number of the rest.
    #[must_use]
    pub fn finish(self) -> (Vec<Journey>, Vec<More>, u64) {
        let mut more: Vec<More> = self
            .kinds
            .into_values()
            .filter(|(times, _)| *times > OF_A_KIND)
            .map(|(times, like)| More { like, times: times - OF_A_KIND })
            .collect();
        more.sort_by_key(|one| one.like);
        (self.journeys, more, self.not_kept)
    }
}
