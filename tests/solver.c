/* A small solver for tests: heat in a rod of N cells, one end of it held at a temperature that each step says.

   Lines in, lines out:  reset | step T | state  ->  N temperatures;   binary  ->  N doubles
   To fail with:         die CODE | crash | hang | silent (closes its output, and lives on) | chatter BYTES (to stderr) */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 4096

static double now[MOST], next[MOST];

int main(int count, char **words) {
    int n = count > 1 ? atoi(words[1]) : 8;
    char line[256];
    if (n < 2 || n > MOST) {
        fprintf(stderr, "cells must be from 2 to %d\n", MOST);
        return 2;
    }
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "reset", 5)) memset(now, 0, sizeof now);
        else if (!strncmp(line, "step", 4)) {
            now[0] = strtod(line + 4, NULL);
            for (int i = 1; i < n; i++)
                next[i] = now[i] + 0.25 * (now[i - 1] - 2 * now[i] + (i + 1 < n ? now[i + 1] : now[i]));
            next[0] = now[0];
            memcpy(now, next, sizeof now);
        } else if (!strncmp(line, "binary", 6)) {
            fwrite(now, sizeof *now, n, stdout);
            fflush(stdout);
            continue;
        } else if (!strncmp(line, "die", 3)) {
            fprintf(stderr, "out of licences\n");
            return atoi(line + 3);
        } else if (!strncmp(line, "crash", 5)) raise(SIGSEGV);
        else if (!strncmp(line, "hang", 4)) sleep(600);
        else if (!strncmp(line, "silent", 6)) { fclose(stdout); close(1); sleep(600); }
        else if (!strncmp(line, "chatter", 7)) {
            for (long i = atol(line + 7); i > 0; i -= 10) fprintf(stderr, "%9ld\n", i);
        }
        for (int i = 0; i < n; i++) printf("%.17g%c", now[i], i + 1 < n ? ' ' : '\n');
        fflush(stdout);
    }
    return 0;
}
