//! The checks, a module for each chapter of the datasheet.

mod commands;
mod completions;
mod events;
mod failures;
mod objects;
mod regions;
mod registers;
mod resets;
mod streams;
mod transfers;
mod unreliable;

use crate::check::Check;

/// All checks, in the order of the datasheet.
pub(crate) fn all() -> impl Iterator<Item = &'static Check> {
    let chapters = [
        registers::ALL,
        commands::ALL,
        objects::ALL,
        events::ALL,
        regions::ALL,
        streams::ALL,
        transfers::ALL,
        unreliable::ALL,
        completions::ALL,
        failures::ALL,
        resets::ALL,
    ];
    chapters.into_iter().flatten()
}
