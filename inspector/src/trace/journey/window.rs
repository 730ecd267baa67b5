//! Puts sightings in the order of time: CPUs and sources deliver them a little apart.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::trace::sighting::Sighting;

/// Holds sightings back until nothing earlier is to be expected.
#[derive(Debug)]
pub(super) struct Window {
    held: BinaryHeap<Reverse<Held>>,
    /// What is held, by number; places that are free are used again.
    places: Vec<Option<Sighting>>,
    free: Vec<usize>,
    /// How long each is held back, nanoseconds.
    wait_ns: u64,
    /// How many are held back at most.
    room: usize,
    newest_ns: u64,
    /// Time of the last one that was let go.
    released_ns: u64,
    arrived: u64,
}

/// A sighting's rank, and where it is: a heap moves what it holds, and this is small.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    monotonic_ns: u64,
    /// Those of the same time keep the order in which they came.
    arrived: u64,
    place: usize,
}

impl Window {
    pub(super) fn new(wait_ns: u64, room: usize) -> Self {
        Self {
            held: BinaryHeap::new(),
            places: Vec::new(),
            free: Vec::new(),
            wait_ns,
            room: room.max(1),
            newest_ns: 0,
            released_ns: 0,
            arrived: 0,
        }
    }

    /// Takes a sighting in; whether it comes after later ones were let go.
    pub(super) fn push(&mut self, sighting: Sighting) -> bool {
        let monotonic_ns = sighting.monotonic_ns;
        self.newest_ns = self.newest_ns.max(monotonic_ns);
        self.arrived += 1;
        let place = if let Some(place) = self.free.pop() {
            self.places[place] = Some(sighting);
            place
        } else {
            self.places.push(Some(sighting));
            self.places.len() - 1
        };
        self.held.push(Reverse(Held { monotonic_ns, arrived: self.arrived, place }));
        monotonic_ns < self.released_ns
    }

    /// Time has come so far.
    pub(super) fn advance(&mut self, now_ns: u64) {
        self.newest_ns = self.newest_ns.max(now_ns);
    }

    /// The next one that is due; `all` lets every one go.
    pub(super) fn pop(&mut self, all: bool) -> Option<Sighting> {
        let Reverse(first) = self.held.peek()?;
        let due = all
            || self.held.len() > self.room
            || first.monotonic_ns.saturating_add(self.wait_ns) <= self.newest_ns;
        if !due {
            return None;
        }
        let Reverse(held) = self.held.pop()?;
        self.released_ns = self.released_ns.max(held.monotonic_ns);
        self.free.push(held.place);
        self.places[held.place].take()
    }

    /// Time of the next one, due or not.
    pub(super) fn next_ns(&self) -> Option<u64> {
        self.held.peek().map(|Reverse(held)| held.monotonic_ns)
    }

    /// Up to when everything has been let go, as far as can be told.
    pub(super) fn settled_ns(&self) -> u64 {
        self.newest_ns.saturating_sub(self.wait_ns).max(self.released_ns)
    }

    /// How many are held back.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }
}
