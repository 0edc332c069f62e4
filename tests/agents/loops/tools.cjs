// What the loops of npm's packages let a model do in the folder that they run in.

const { spawnSync } = require("node:child_process");
const { readFileSync, writeFileSync } = require("node:fs");

const text = (description) => ({ type: "string", description });

// Each with its description, the properties of its input, and what it does.
module.exports = {
  run: ["Run a command.", { command: text("what a shell is told") }, ({ command }) => {
    const done = spawnSync("/bin/sh", ["-c", `${command} 2>&1`], { encoding: "utf8" });
    return done.stdout;
  }],
  read: ["Read a file.", { path: text("the file") }, ({ path }) => readFileSync(path, "utf8")],
  write: ["Write a file.", { path: text("the file"), text: text("all that it is to hold") }, ({ path, text }) => {
    writeFileSync(path, text);
    return "written";
  }],
  edit: ["Replace a line of a file.", { path: text("the file"), old: text("the line"), text: text("what takes its place") },
    ({ path, old, text }) => {
      writeFileSync(path, readFileSync(path, "utf8").replace(old, () => text));
      return "replaced";
    }],
};
