//! Output: one file for each form, no decisions.

pub mod datapath;
pub mod journeys;
pub mod json;
pub mod lb_list;
pub mod markdown;
pub mod service_list;
pub mod table;
mod text_table;

pub use text_table::TextTable;
