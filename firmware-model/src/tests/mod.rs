//! The device as its driver sees it.

mod commands;
mod completions;
mod elsewhere;
mod gather;
mod nonsense;
mod pairs;
mod streams;
mod virtual_time;
