//! inspector: what a Cilium node has programmed for a VIP, and what that does to a packet.
//!
//! [`collect::node`] reads a node into [`evidence::Evidence`]; [`judge::judge`] makes a
//! [`judge::Judgement`] of it, a pure function; [`report`] prints one. The binary `inspect` uses
//! nothing else.

pub mod checklist;
pub mod cilium;
pub mod collect;
pub mod evidence;
pub mod inject;
pub mod judge;
pub mod lint;
pub mod packet;
pub mod report;
pub mod simulate;
pub mod sys;
pub mod trace;
