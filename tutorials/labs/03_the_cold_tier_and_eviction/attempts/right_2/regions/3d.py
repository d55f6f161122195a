        over = len(self) > self.capacity
        new = self._newcomer
        done = {new} if over else set()
        places = self._small_places + (over and new in self._small)
        todo = [len(self._small) - (over and new in self._small),
                len(self._main) - (over and new in self._main)]
        queues = [self._small, self._main]
        while any(todo):
            which = 0 if len(self._small) >= places else 1
            if todo[which] == 0:
                which = 1 - which
            queue = queues[which]
            item, uses = queue.popitem(last=False)
            if item in done:
                queue[item] = uses
            elif which == 0 and uses > 1:
                self._main[item] = 0
                todo[0] -= 1
                todo[1] += 1
            elif which == 1 and uses > 0:
                queue[item] = uses - 1
            else:
                queue[item] = uses
                queue.move_to_end(item, last=False)
                yield item
                queue.move_to_end(item)
                done.add(item)
                todo[which] -= 1
        if over:
            yield new
