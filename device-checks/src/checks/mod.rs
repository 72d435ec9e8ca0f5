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

use crate::Check;

/// Names each function, with its module in front.
macro_rules! checks {
    ($($name:ident,)*) => {
        pub(super) const ALL: &[crate::Check] = &[$(crate::Check {
            name: {
                const NAME: &str = concat!(module_path!(), "::", stringify!($name));
                crate::checks::short(NAME)
            },
            run: $name,
        },)*];
    };
}
use checks;

/// The last two parts of a path.
const fn short(path: &'static str) -> &'static str {
    const HERE: usize = module_path!().len() + 2;
    path.split_at(HERE).1
}

/// All of them, in the order of the datasheet.
pub(crate) fn all() -> impl Iterator<Item = &'static Check> {
    let chapters = [
        registers::ALL,
        commands::ALL,
        objects::ALL,
        events::ALL,
        regions::ALL,
        streams::ALL,
        transfers::ALL,
        completions::ALL,
        failures::ALL,
        resets::ALL,
    ];
    chapters.into_iter().flatten()
}
