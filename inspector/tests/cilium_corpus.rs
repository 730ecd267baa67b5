//! The fuzzing corpus (see `fuzz/README.md`), run without a fuzzer.

use std::{collections::BTreeSet, fs, path::Path};

use cilium::layout::LAYOUTS;
use inspector::cilium;

#[path = "../../fuzz/check.rs"]
mod check;

#[test]
fn the_corpus_holds() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/decode");
    let mut layouts = BTreeSet::new();
    let mut inputs = 0;
    for file in fs::read_dir(&corpus).expect("fuzz/corpus/decode is part of the project") {
        let input = fs::read(file.unwrap().path()).unwrap();
        inputs += 1;
        if check::decode(&input) {
            layouts.insert(usize::from(input[0]) % LAYOUTS.len());
        }
    }
    // A corpus that no longer reaches a decoder (after a change of the layout table, say) tests
    // nothing there.
    let missed: Vec<_> = (0..LAYOUTS.len())
        .filter(|index| !layouts.contains(index))
        .map(|index| LAYOUTS[index].name)
        .collect();
    assert_eq!(missed, [""; 0], "no entry of these in {inputs} inputs");
}
