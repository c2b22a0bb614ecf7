//! Files in common formats, and what is wrong with them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, SystemTime};

use phalanx_data::folder::{
    CsvDataset, CsvOptions, ElementType, ImageFolder, JsonLinesDataset, NpyDataset, SafetensorsDataset, files,
};
use phalanx_data::{DataLoader, Dataset};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Mail {
    text: String,
    spam: bool,
}

fn mail(n: usize) -> Mail {
    Mail {
        text: format!("mail {n}, \"quoted\"\nand in two lines {}", "x".repeat(n * 37)),
        spam: n.is_multiple_of(3),
    }
}

fn written(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// Checks that the error names all of it.
fn names<T>(outcome: phalanx::Result<T>, words: &[&str]) {
    let text = outcome.err().unwrap().to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

#[test]
fn lines_of_json_are_read_by_their_places() {
    let folder = tempfile::tempdir().unwrap();
    let mut lines: Vec<String> = (0..200).map(|n| serde_json::to_string(&mail(n)).unwrap()).collect();
    lines.insert(50, "  ".into());
    let path = written(folder.path(), "train.jsonl", lines.join("\r\n"));
    let mails = JsonLinesDataset::<Mail>::open(&path).unwrap();
    assert_eq!(mails.len(), 200);
    for n in [0, 49, 50, 51, 199] {
        assert_eq!(mails.get(n).unwrap(), mail(n));
    }
    let loader = DataLoader::builder(mails).batch_size(7).num_workers(3).build().unwrap();
    assert_eq!(loader.iter().flat_map(Result::unwrap).count(), 200);
    assert_eq!(JsonLinesDataset::<Mail>::open(written(folder.path(), "empty", "")).unwrap().len(), 0);
    assert_eq!(JsonLinesDataset::<Mail>::open(written(folder.path(), "blank", "\n \n")).unwrap().len(), 0);
}

#[test]
fn a_bad_line_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "{\"text\":\"a\",\"spam\":true}\n\n{\"text\":\"b\"}\n{\"text\":\nfalse\n";
    let mails = JsonLinesDataset::<Mail>::open(written(folder.path(), "x.jsonl", lines)).unwrap();
    assert!(mails.get(0).is_ok());
    names(mails.get(1), &["x.jsonl, line 3", "missing field `spam`", "mend the line"]);
    names(mails.get(2), &["line 4", "EOF"]);
    names(mails.get(4), &["no item 4"]);
    let long = folder.path().join("long");
    let mut file = fs::File::create(&long).unwrap();
    (0..66).for_each(|_| file.write_all(&[b'x'; 1 << 20]).unwrap());
    names(JsonLinesDataset::<Mail>::open(&long), &["long, line 1", "too long", "line breaks"]);
    names(CsvDataset::<Mail>::open(&long), &["long, line 1", "longer than 64 MiB"]);
}

#[test]
fn records_of_csv_are_read_by_their_places() {
    let folder = tempfile::tempdir().unwrap();
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let mut lines = vec!["text,spam".to_owned()];
    lines.extend((0..200).map(|n| format!("{},{}", quoted(&mail(n).text), mail(n).spam)));
    let mails = CsvDataset::<Mail>::open(written(folder.path(), "train.csv", lines.join("\n"))).unwrap();
    assert_eq!((mails.len(), mails.headers().collect::<Vec<_>>()), (200, vec!["text", "spam"]));
    for n in [0, 1, 57, 199] {
        assert_eq!(mails.get(n).unwrap(), mail(n));
    }
    let tabs = written(folder.path(), "tabs", "spam\ttext\ntrue\ta,b\n");
    let tabs = CsvDataset::<Mail>::with_options(tabs, CsvOptions::new().delimiter(b'\t')).unwrap();
    assert_eq!(tabs.get(0).unwrap(), Mail { text: "a,b".into(), spam: true });
    let bad =
        CsvDataset::<Mail>::open(written(folder.path(), "x.csv", "text,spam\na,true\n\"b\nc\",maybe\n"))
            .unwrap();
    names(bad.get(1), &["x.csv, line 3", "`true` or `false`", "mend the record"]);
    let uneven = CsvDataset::<Mail>::open(written(folder.path(), "y.csv", "text,spam\na,true\nb\n"));
    names(uneven, &["y.csv, line 3", "fields"]);
    // As spreadsheets write it, with empty columns behind those with a name.
    let sheet = written(folder.path(), "sheet.csv", "text,spam,,\na,true,,\nb,false,x,y\n");
    let sheet = CsvDataset::<Mail>::open(sheet).unwrap();
    assert_eq!(sheet.get(1).unwrap(), Mail { text: "b".into(), spam: false });
    let twice = CsvDataset::<Mail>::open(written(folder.path(), "z.csv", "text,spam,text\na,true,b\n"));
    names(twice, &["z.csv", "two columns", "\"text\""]);
    let path = written(folder.path(), "few.csv", "text,spam\na,true\n");
    for delimiter in [b'"', b'\n', b'\r'] {
        let options = CsvOptions::new().delimiter(delimiter);
        names(CsvDataset::<Mail>::with_options(&path, options), &["cannot be the delimiter", "b','"]);
    }
}

/// A safetensors file of tensors: type, shape, bytes.
fn safetensors(tensors: &[(&str, &str, &[usize], &[u8])]) -> Vec<u8> {
    let (mut header, mut data) = (BTreeMap::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let end = data.len() + bytes.len();
        header.insert(
            *name,
            serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [data.len(), end] }),
        );
        data.extend_from_slice(bytes);
    }
    let header = serde_json::to_vec(&header).unwrap();
    [(header.len() as u64).to_le_bytes().to_vec(), header, data].concat()
}

fn floats(from: usize, count: usize) -> Vec<u8> {
    (from..from + count).flat_map(|n| (n as f32).to_le_bytes()).collect()
}

#[test]
fn rows_of_tensors_are_items() {
    let folder = tempfile::tempdir().unwrap();
    for (part, rows) in [3_usize, 0, 4].into_iter().enumerate() {
        let first = [0, 3, 3][part];
        let labels: Vec<u8> = (first..first + rows).map(|row| row as u8).collect();
        let file = safetensors(&[
            ("x", "F32", &[rows, 2, 2], &floats(4 * first, 4 * rows)),
            ("y", "U8", &[rows], &labels),
        ]);
        written(folder.path(), &format!("part-{part}.safetensors"), file);
    }
    let dataset = SafetensorsDataset::open(folder.path()).unwrap();
    assert_eq!(dataset.len(), 7);
    for row in 0..7 {
        let item = dataset.get(row).unwrap();
        assert_eq!((item["x"].shape(), item["y"].shape()), (&[2, 2][..], &[][..]));
        assert_eq!(item["x"].as_slice::<f32>().unwrap()[3], (4 * row + 3) as f32);
        assert_eq!(
            (item["y"].as_slice::<u8>().unwrap(), item["y"].dtype()),
            (&[row as u8][..], ElementType::U8)
        );
    }
    assert!(dataset.get(7).is_err() && dataset.get(0).unwrap()["x"].as_slice::<f64>().is_err());
}

#[test]
fn a_safetensors_file_with_a_wrong_shape_is_named() {
    let refused = |name: &str, bytes: Vec<u8>, words: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        written(folder.path(), "a.safetensors", safetensors(&[("x", "F32", &[2, 2], &floats(0, 4))]));
        written(folder.path(), &format!("{name}.safetensors"), bytes);
        names(SafetensorsDataset::open(folder.path()), &[&[name][..], words].concat());
    };
    refused("b", safetensors(&[("x", "F32", &[2, 3], &floats(0, 6))]), &["\"x\"", "[3]", "[2]"]);
    refused("b", safetensors(&[("x", "F64", &[1, 2], &[0; 16])]), &["\"x\"", "f64", "f32"]);
    refused("b", safetensors(&[("z", "F32", &[2, 2], &floats(0, 4))]), &["[\"z\"]"]);
    refused(
        "b",
        safetensors(&[("x", "F32", &[2, 2], &floats(0, 4)), ("y", "F32", &[3, 2], &floats(0, 6))]),
        &["rows"],
    );
    refused("b", safetensors(&[("x", "F32", &[], &floats(0, 1))]), &["scalar"]);
    refused("b", safetensors(&[("x", "F32", &[9, 2], &floats(0, 4))]), &["b.safetensors"]);
    let mut cut = safetensors(&[("x", "F32", &[2, 2], &floats(0, 4))]);
    cut.truncate(cut.len() - 1);
    refused("b", cut, &["b.safetensors"]);
    refused("b", vec![255; 8], &["its header", "Copy it again"]);
    refused("b", vec![1], &["its header"]);
}

fn npy(header: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{header:<117}\n");
    [
        b"\x93NUMPY\x01\x00".to_vec(),
        (header.len() as u16).to_le_bytes().to_vec(),
        header.into_bytes(),
        data.to_vec(),
    ]
    .concat()
}

#[test]
fn rows_of_numpy_s_arrays_are_items() {
    let folder = tempfile::tempdir().unwrap();
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }";
    let path = written(folder.path(), "x.npy", npy(header, &floats(0, 6)));
    let one = NpyDataset::open(&path).unwrap();
    let row = one.get(2).unwrap();
    assert_eq!((one.len(), row.shape(), row.as_slice::<f32>().unwrap()), (3, &[2][..], &[4.0, 5.0][..]));
    written(folder.path(), "y.npy", npy(header, &floats(6, 6)));
    let both = NpyDataset::open(folder.path()).unwrap();
    assert_eq!((both.len(), both.get(5).unwrap().as_slice::<f32>().unwrap()), (6, &[10.0, 11.0][..]));
    let refused = |header: &str, data: &[u8], words: &[&str]| {
        names(NpyDataset::open(written(folder.path(), "z.npy", npy(header, data))), words);
    };
    refused("{'descr': '>f4', 'fortran_order': False, 'shape': (3, 2), }", &[0; 24], &[">f4", "astype"]);
    refused("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }", &[0; 23], &["cut off"]);
    refused("{'descr': '<f4', 'fortran_order': False, 'shape': (), }", &[0; 4], &["scalar"]);
    refused("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 9999999999999), }", &[0; 24], &["1 GiB"]);
    refused("nonsense", &[], &["its header"]);
    names(
        NpyDataset::open(written(
            folder.path(),
            "b.npy",
            npy("{'descr': '|b1', 'fortran_order': False, 'shape': (2,), }", &[1, 2]),
        ))
        .unwrap()
        .get(1),
        &["b.npy, row 1", "bool"],
    );
}

#[test]
fn a_header_of_brackets_in_brackets_is_refused_and_holds_nobody_up() {
    let folder = tempfile::tempdir().unwrap();
    let brackets = |open: &str, close: &str, depth: usize| open.repeat(depth) + "1" + &close.repeat(depth);
    // In strings they close nothing.
    let (text, escaped) = (brackets("[']', ", "", 10_000), brackets(r"['\N{'}', ", "", 6_000));
    let deep = [brackets("[", "]", 60), brackets("{", "}", 60), brackets("(", "", 60_000), text, escaped];
    for descr in deep {
        let header = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (3, 2), }}");
        let path = written(folder.path(), "deep.npy", npy(&header, &floats(0, 6)));
        let (tell, told) = channel();
        std::thread::spawn(move || tell.send(NpyDataset::open(path).map(drop)));
        names(told.recv_timeout(Duration::from_secs(60)).unwrap(), &["deep.npy", "its header", "brackets"]);
    }
    // One of named fields is not so deep.
    let fields = "{'descr': [('a([{(', '<f4'), ('b', '<f4')], 'fortran_order': False, 'shape': (3,), }";
    let fields = NpyDataset::open(written(folder.path(), "fields.npy", npy(fields, &floats(0, 6))));
    names(fields, &["fields.npy", "its array", "not supported", "astype"]);
}

/// Writes a file anew in its place, as `open(path, "w")` in Python does: who has it open sees the new content.
fn rewritten(path: &Path, bytes: impl AsRef<[u8]>) {
    let mut file = fs::File::options().write(true).truncate(true).open(path).unwrap();
    file.write_all(bytes.as_ref()).unwrap();
    // However coarse the file system's clock is.
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
}

fn appended(path: &Path, text: &str) {
    fs::File::options().append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

#[test]
fn lines_that_are_not_where_they_were_are_refused_and_a_file_may_grow() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), "numbers.csv", "n\r\n1234\r\n5678\r\n");
    let numbers = CsvDataset::<(u32,)>::open(&path).unwrap();
    appended(&path, "9\r\n");
    assert_eq!([numbers.get(0).unwrap(), numbers.get(1).unwrap()], [(1234,), (5678,)]);
    for other in ["n\r\n12\r\n345678\r\n", "n\r\n1", "n\r\n1\n23\n56\n7890\n", "n\n123\n45678\n90123\n"] {
        rewritten(&path, other);
        for item in 0..2 {
            names(
                numbers.get(item),
                &["numbers.csv", &format!("item {item}"), "was changed", "open it again"],
            );
        }
    }

    let path = written(folder.path(), "last.csv", "n\n7");
    let numbers = CsvDataset::<(u32,)>::open(&path).unwrap();
    appended(&path, "\n8\n");
    assert_eq!(numbers.get(0).unwrap(), (7,));

    let path = written(folder.path(), "numbers.jsonl", "\u{feff}1234\n5678");
    let numbers = JsonLinesDataset::<u32>::open(&path).unwrap();
    appended(&path, "\n9");
    assert_eq!([numbers.get(0).unwrap(), numbers.get(1).unwrap()], [1234, 5678]);
    for other in ["\u{feff}12\n345678\n", "\u{feff}1", "1234\n5678\n", "\u{feff}12345678901\n"] {
        rewritten(&path, other);
        for item in 0..2 {
            names(numbers.get(item), &["numbers.jsonl", &format!("item {item}"), "was changed"]);
        }
    }
}

#[test]
fn arrays_of_a_file_that_was_written_anew_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }";
    let (first, other) = (npy(header, &floats(0, 6)), npy(header, &floats(6, 6)));
    // One is open, and of the other only the header was read.
    for (name, reads) in [("open.npy", true), ("closed.npy", false)] {
        let path = written(folder.path(), name, &first);
        let rows = NpyDataset::open(&path).unwrap();
        if reads {
            assert_eq!(rows.get(0).unwrap().as_slice::<f32>().unwrap(), [0.0, 1.0]);
        }
        rewritten(&path, &other);
        names(rows.get(1), &[name, "row 1", "was changed", "open it again"]);
    }
    let tensors = |from| safetensors(&[("x", "F32", &[3, 2], &floats(from, 6))]);
    let path = written(folder.path(), "x.safetensors", tensors(0));
    let rows = SafetensorsDataset::open(&path).unwrap();
    // Another file of its name and length.
    let copy = written(folder.path(), "copy", b"");
    rewritten(&copy, tensors(6));
    fs::rename(copy, &path).unwrap();
    names(rows.get(2), &["x.safetensors", "row 2", "was changed"]);
}

#[test]
fn images_have_their_folder_as_class() {
    let folder = tempfile::tempdir().unwrap();
    for (class, names) in [("dog", &["b.png", "a.bmp"][..]), ("cat", &["c.ppm", "deep/d.PNG", "notes.txt"])] {
        for name in names {
            let path = folder.path().join(class).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let (width, height) = (name.len() as u32, 2);
            let image = image::RgbImage::from_pixel(width, height, image::Rgb([1, 2, 3]));
            if name.ends_with("txt") {
                fs::write(&path, "no image").unwrap()
            } else {
                image.save(&path).unwrap()
            }
        }
    }
    let images = ImageFolder::open(folder.path()).unwrap();
    let names_of: Vec<_> =
        images.files().iter().map(|(path, class)| (path.file_name().unwrap().to_owned(), *class)).collect();
    assert_eq!(images.classes(), ["cat", "dog"]);
    assert_eq!(
        names_of,
        [("c.ppm".into(), 0), ("d.PNG".into(), 0), ("a.bmp".into(), 1), ("b.png".into(), 1)]
    );
    let sample = images.get(1).unwrap();
    assert_eq!((sample.class, sample.image.dimensions(), sample.image[(0, 0)].0), (0, (10, 2), [1, 2, 3]));
    let loader = DataLoader::builder(images).batch_size(2).num_workers(2).build().unwrap();
    assert_eq!(
        loader.iter().flat_map(Result::unwrap).map(|sample| sample.class).collect::<Vec<_>>(),
        [0, 0, 1, 1]
    );

    fs::write(folder.path().join("dog/b.png"), "torn").unwrap();
    let broken = ImageFolder::open(folder.path()).unwrap();
    names(broken.get(3), &["dog/b.png", "remove the file"]);
    // A header that announces more than there may be.
    let mut huge = Vec::from(&b"P6 100000 100000 255\n"[..]);
    huge.extend([0; 100]);
    fs::write(folder.path().join("dog/b.png"), huge).unwrap();
    names(broken.get(3), &["dog/b.png", "32,768"]);
    // A link out of the folder, to what is no file.
    fs::remove_file(folder.path().join("dog/b.png")).unwrap();
    std::os::unix::fs::symlink("/dev/null", folder.path().join("dog/b.png")).unwrap();
    names(broken.get(3), &["dog/b.png", "no regular file"]);
    fs::create_dir(folder.path().join("empty")).unwrap();
    names(ImageFolder::open(folder.path()), &["empty", "is the path right?"]);
    names(ImageFolder::open(folder.path().join("empty")), &["a folder for each class"]);
}

/// Without it the class of a disk that a host has not mounted would be left out there, and those behind it would have other numbers.
#[test]
fn a_link_that_leads_nowhere_is_refused_and_one_to_a_folder_is_followed() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for path in [folder.path().join("dog/a.png"), elsewhere.path().join("photos/b.png")] {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        image::RgbImage::new(1, 1).save(path).unwrap();
    }
    std::os::unix::fs::symlink(elsewhere.path().join("photos"), folder.path().join("cat")).unwrap();
    let images = ImageFolder::open(folder.path()).unwrap();
    assert_eq!((images.classes(), images.len()), (&["cat".to_owned(), "dog".to_owned()][..], 2));
    // Hidden entries are none of the data set's.
    std::os::unix::fs::symlink("nowhere", folder.path().join(".lock")).unwrap();
    assert_eq!(ImageFolder::open(folder.path()).unwrap().len(), 2);

    fs::rename(elsewhere.path().join("photos"), elsewhere.path().join("gone")).unwrap();
    names(ImageFolder::open(folder.path()), &["cat leads nowhere", "does every host see"]);
    names(files(folder.path(), &["png"]), &["cat leads nowhere"]);
    // One that leads to itself.
    fs::remove_file(folder.path().join("cat")).unwrap();
    std::os::unix::fs::symlink("cat", folder.path().join("cat")).unwrap();
    names(ImageFolder::open(folder.path()), &["cat"]);
}

#[test]
fn files_with_as_many_items_are_told_apart_by_their_fingerprints() {
    let folder = tempfile::tempdir().unwrap();
    let lines = |text: &str| {
        let path = written(folder.path(), "a.jsonl", text);
        JsonLinesDataset::<u32>::open(path).unwrap().fingerprint()
    };
    assert!(lines("1\n2\n") == lines("3\n4\n") && lines("1\n2\n") != lines("1\n22\n"));
    let records = |text: &str| {
        let path = written(folder.path(), "a.csv", text);
        CsvDataset::<(u32,)>::open(path).unwrap().fingerprint()
    };
    assert!(records("x\n1\n2\n") == records("x\n3\n4\n") && records("x\n1\n2\n") != records("x\n1\n22\n"));
    let images = |root: &str, name: &str| {
        let class = folder.path().join(root).join("cat");
        fs::create_dir_all(&class).unwrap();
        written(&class, name, "");
        ImageFolder::open(folder.path().join(root)).unwrap().fingerprint()
    };
    let one = images("one", "1.png");
    assert!(one == images("two", "1.png") && one != images("three", "2.png"));
}
