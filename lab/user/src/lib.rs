//! The lab: a node in network namespaces.
