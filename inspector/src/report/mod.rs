//! Output: one file for each form, no decisions.

pub mod annotations;
pub mod ci;
pub mod cluster;
pub mod datapath;
pub mod html;
pub mod injection;
pub mod journeys;
pub mod json;
pub mod junit;
pub mod lb_list;
mod lint;
pub mod markdown;
mod page;
pub mod picture;
pub mod service_list;
pub mod table;
mod text_table;
mod timeline;

pub use text_table::TextTable;
