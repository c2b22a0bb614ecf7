//! Packs the files of a folder into LMDB, with the folder that each is in as its class.
//!
//! ```sh
//! cargo run --release -p phalanx-data --features lmdb --example pack -- photos/ photos.lmdb
//! ```
//!
//! Item n is the n-th file in the order of names: 4 bytes with the number of its class (little-endian), and then the file. Classes and files
//! are numbered as by `ImageFolder`: those in folders of a class are its files too, and names that begin with a dot are left out. Files that
//! are no images are packed, too; `ImageFolder` leaves them out. The names of the classes go beside it, into `classes.txt`, in their order. The
//! second command line shows what was packed:
//!
//! ```sh
//! cargo run --release -p phalanx-data --features lmdb --example pack -- photos.lmdb
//! ```

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use phalanx_data::Dataset;
use phalanx_data::lmdb::{LmdbDataset, LmdbWriter};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [folder, packed] => pack(Path::new(folder), Path::new(packed)),
        [packed] => show(Path::new(packed)),
        _ => Err("pack FOLDER PACKED, or pack PACKED to show what is in it".into()),
    }
}

/// Packs the files of `folder`, by class, into `packed`.
pub fn pack(folder: &Path, packed: &Path) -> Result<(), Box<dyn Error>> {
    let mut writer = LmdbWriter::create(packed)?;
    let mut classes = Vec::new();
    for class in sorted(folder)? {
        if !about(&class)?.is_dir() {
            continue;
        }
        let number = u32::try_from(classes.len())?.to_le_bytes();
        push_files(&class, &number, &mut writer)?;
        classes.push(class.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
    let items = writer.finish()?;
    let names = packed.join("classes.txt");
    fs::write(&names, classes.join("\n")).map_err(|error| {
        format!(
            "{}: {error}: the classes have no names; remove {} and pack it again",
            names.display(),
            packed.display()
        )
    })?;
    println!("{items} files of {} classes", classes.len());
    Ok(())
}

/// Adds the files in `folder` and in the folders in it, with the `number` of their class.
fn push_files(folder: &Path, number: &[u8], writer: &mut LmdbWriter) -> Result<(), Box<dyn Error>> {
    for path in sorted(folder)? {
        let about = about(&path)?;
        if about.is_dir() {
            push_files(&path, number, writer)?;
        } else if about.is_file() {
            writer.push(&[number, &fs::read(path)?].concat())?;
        }
    }
    Ok(())
}

/// Of what a link leads to. One that leads nowhere is an error: what is behind it may be a class that this host does not see.
fn about(path: &Path) -> Result<fs::Metadata, String> {
    fs::metadata(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// What is in a folder, without hidden names.
fn sorted(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut paths =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    paths.retain(|path| !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")));
    paths.sort();
    Ok(paths)
}

fn show(packed: &Path) -> Result<(), Box<dyn Error>> {
    let dataset = LmdbDataset::open(packed)?;
    let names = packed.join("classes.txt");
    let classes = fs::read_to_string(&names).map_err(|error| format!("{}: {error}", names.display()))?;
    let classes: Vec<&str> = classes.lines().collect();
    let mut counts = vec![(0_usize, 0_usize); classes.len()];
    for index in 0..dataset.len() {
        let (class, bytes) = dataset
            .read(index, |item| (item.first_chunk().map(|class| u32::from_le_bytes(*class)), item.len()))?;
        let class = class.and_then(|class| counts.get_mut(class as usize)).ok_or("an item has no class")?;
        *class = (class.0 + 1, class.1 + bytes - 4);
    }
    for (class, (files, bytes)) in classes.iter().zip(counts) {
        println!("{class:<20} {files:>8} files {bytes:>12} bytes");
    }
    Ok(())
}
