//! Types that inspector and its eBPF programs share.
#![no_std]
